"""Layer selection and copying over several architectures; the vocabulary shortlist."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from distill.draft_init import draft_from_layers, frequent_token_ids, num_parameters, select_layers

NUM_LAYERS = 5
SIZES = {
    "vocab_size": 37, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32, "pad_token_id": 0,
}
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=37, n_embd=16, n_layer=NUM_LAYERS, n_head=2, n_positions=32)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=8)),
    "phi": lambda: PhiForCausalLM(PhiConfig(**SIZES)),
    "phi3": lambda: Phi3ForCausalLM(Phi3Config(**SIZES)),
    "qwen2": lambda: Qwen2ForCausalLM(
        Qwen2Config(**SIZES, use_sliding_window=True, max_window_layers=3, sliding_window=4, tie_word_embeddings=True)
    ),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=8)),
    "gemma2": lambda: Gemma2ForCausalLM(Gemma2Config(**SIZES, head_dim=8, sliding_window=4)),
    "gemma3": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, head_dim=8, sliding_window=4)),
}


def test_select_layers() -> None:
    assert select_layers(30, 4) == [0, 10, 19, 29]
    assert select_layers(30, 1) == [0]
    assert select_layers(4, 4) == [0, 1, 2, 3]
    assert select_layers(30, 4, [0, 1, 28, 29]) == [0, 1, 28, 29]
    for num_layers in range(2, 30):
        kept = select_layers(30, num_layers)
        assert len(set(kept)) == num_layers
        assert kept[0] == 0
        assert kept[-1] == 29


@pytest.mark.parametrize(
    ("num_layers", "keep", "message"),
    [
        (31, None, r"draft.num_layers=31: choose from 1 to 30"),
        (4, [0, 30], r"draft.keep_layers=\[0, 30\]: the target has layers 0 to 29, not \[30\]"),
        (4, [3, 1], "ascending order"),
        (4, [1, 1], "each layer once"),
    ],
)
def test_select_layers_refuses(num_layers: int, keep: list[int] | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        select_layers(30, num_layers, keep)


def logits_of(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.arange(1, 13)[None], use_cache=False).logits


@pytest.mark.parametrize("name", MODELS)
def test_all_layers_kept_is_the_target(name: str) -> None:
    torch.manual_seed(0)
    target = MODELS[name]().eval()
    draft = draft_from_layers(target, range(NUM_LAYERS))
    torch.testing.assert_close(logits_of(draft), logits_of(target), rtol=0, atol=0)


@pytest.mark.parametrize("name", MODELS)
def test_kept_layers_are_copied_in_order(name: str, tmp_path: Path) -> None:
    """The draft equals the target whose other layers are bypassed, also after a round trip through disk."""
    torch.manual_seed(0)
    target = MODELS[name]().eval()
    kept = [0, 2, 4]
    draft = draft_from_layers(target, kept)
    assert draft.config.num_hidden_layers == 3
    layers = next(module for module in target.modules() if isinstance(module, torch.nn.ModuleList))
    for index in set(range(NUM_LAYERS)) - set(kept):
        layers[index].forward = lambda hidden_states, *args, **kwargs: hidden_states
    torch.testing.assert_close(logits_of(draft), logits_of(target), rtol=1e-6, atol=1e-6)
    draft.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(logits_of(loaded), logits_of(draft), rtol=0, atol=0)
    types = getattr(target.config, "layer_types", None)
    if types is not None:
        assert list(loaded.config.layer_types) == [types[index] for index in kept]


@pytest.mark.parametrize("name", MODELS)
def test_cached_decoding_agrees(name: str) -> None:
    """Cache slots go by layer index, so the copied layers must be renumbered."""
    torch.manual_seed(0)
    draft = draft_from_layers(MODELS[name]().eval(), [1, 4])
    tokens = torch.arange(1, 13)[None]
    with torch.no_grad():
        cache = draft(input_ids=tokens[:, :7], use_cache=True).past_key_values
        rest = draft(input_ids=tokens[:, 7:], past_key_values=cache, use_cache=True).logits
    torch.testing.assert_close(rest, logits_of(draft)[:, 7:], rtol=1e-4, atol=1e-5)


def test_draft_is_a_copy_with_tied_embeddings(llama: Callable[..., LlamaForCausalLM]) -> None:
    target = llama()
    before = target.model.layers[0].mlp.up_proj.weight.clone()
    draft = draft_from_layers(target, [0, 3])
    assert draft.lm_head.weight is draft.model.embed_tokens.weight
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.zero_()
    assert torch.equal(target.model.layers[0].mlp.up_proj.weight, before)
    assert num_parameters(draft) == sum(p.numel() for p in draft.parameters())
    assert draft.config.vocab_size == target.config.vocab_size


def test_dtype_is_the_targets(llama: Callable[..., LlamaForCausalLM]) -> None:
    assert draft_from_layers(llama().bfloat16(), [0, 3]).dtype == torch.bfloat16


def test_generation_config_has_no_penalties(llama: Callable[..., LlamaForCausalLM]) -> None:
    """Soup 345: a repetition penalty in the generation config made draft == target score below 1."""
    target = llama()
    target.generation_config.repetition_penalty = 1.3
    target.generation_config.temperature = 0.2
    target.generation_config.do_sample = True
    kept = draft_from_layers(target, [0, 3]).generation_config.to_diff_dict()
    assert kept.pop("eos_token_id") == 2
    assert set(kept) <= {"bos_token_id", "pad_token_id", "transformers_version", "_from_model_config"}


def corpus_of(responses: list[list[int]]) -> Dataset:
    return Dataset.from_dict({"response_token_ids": responses})


def test_frequent_token_ids() -> None:
    corpus = corpus_of([[7, 7, 7, 40, 40, 3], [40, 9, 9]])
    assert frequent_token_ids(corpus, 3, []) == [7, 9, 40]
    assert frequent_token_ids(corpus, 3, [500]) == [7, 40, 500]
    assert frequent_token_ids(corpus, 6, [2]) == [0, 2, 3, 7, 9, 40]
    with pytest.raises(ValueError, match="draft.vocab_shortlist=1"):
        frequent_token_ids(corpus, 1, [0, 1])
