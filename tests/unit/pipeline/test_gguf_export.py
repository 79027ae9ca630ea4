"""GGUF files, read back by two other programs' readers: `gguf`'s own and Transformers' GGUF loader."""

import copy
import json
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import GGUFReader, TokenType
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from pipeline.gguf_export import main
from pipeline.gguf_export_model import llama3_factors, write_gguf
from pipeline.gguf_export_tokenizer import NAME_OF_PATTERN, pre_tokenizer_name
from pipeline.random_target import build_tokenizer
from tests.unit.pipeline.tiny_models import make_model, make_tokenizer, save

HAS_GGUF_CONFIG = hasattr(transformers, "GgufConfig")
NUM_IDS = 320
TEXTS = (
    "Hello there, world!",
    "<|im_start|>user\nIt's 12 o'clock.<|im_end|>\n",
    "  two  spaces — Ünïcödé 日本",
)
IDS_BT = torch.tensor([[1, 5, 9, 30, 7, 50, 4, 310, 264]])


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer(NUM_IDS)


def load(path: Path) -> PreTrainedModel:
    """As Transformers reads it, in fp32. Version 5.16 has no GgufConfig, and always dequantizes."""
    asked = {"quantization_config": transformers.GgufConfig(dequantize=True)} if HAS_GGUF_CONFIG else {}
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, **asked
    )
    return model.eval()


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS_BT).logits


def rounded(model: PreTrainedModel, through: Callable[[torch.Tensor], torch.Tensor]) -> PreTrainedModel:
    """The same model with its matrices as the file holds them."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(through(parameter))
    return model


def through_q8_0(values: torch.Tensor) -> torch.Tensor:
    kind = gguf.GGMLQuantizationType.Q8_0
    return torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(values.numpy(), kind), kind))


def wide_headed(model: PreTrainedModel) -> PreTrainedModel:
    """Heads of size 128, which is what Transformers' reader takes every Qwen3 to have."""
    config = copy.deepcopy(model.config)
    config.head_dim = 128
    torch.manual_seed(4)
    wide = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in wide.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.2)
    return wide


ROUNDING = {"f16": lambda values: values.half().float(), "q8_0": through_q8_0}


@pytest.mark.parametrize("file_type", ["f16", "q8_0"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_each_family_gives_the_same_logits_from_its_gguf(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, family: str, tied: bool, file_type: str
) -> None:
    model = make_model(family, vocab_size=NUM_IDS, tied=tied, seed=3)
    if family == "qwen3":
        model = wide_headed(model)
    write_gguf(tmp_path / "model.gguf", model, tokenizer, file_type=file_type, name="tiny")
    loaded = load(tmp_path / "model.gguf")
    names = {tensor.name for tensor in GGUFReader(tmp_path / "model.gguf").tensors}
    assert ("output.weight" in names) is not tied
    torch.testing.assert_close(
        logits(loaded), logits(rounded(model, ROUNDING[file_type])), rtol=1e-4, atol=1e-4
    )


def test_metadata_and_padded_vocabulary(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """ids beyond the tokenizer (trl 3028) are unused tokens; special ones are control tokens."""
    model = make_model("llama", vocab_size=NUM_IDS + 8, context=256)
    write_gguf(tmp_path / "model.gguf", model, tokenizer, file_type="f16", name="tiny")
    fields = {name: field.contents() for name, field in GGUFReader(tmp_path / "model.gguf").fields.items()}
    expected = {
        "general.architecture": "llama",
        "llama.context_length": 256,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.rope.dimension_count": 8,
        "llama.rope.freq_base": 10000.0,
        "llama.vocab_size": NUM_IDS + 8,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": tokenizer.chat_template,
    }
    assert {name: fields.get(name) for name in expected} == expected
    types = fields["tokenizer.ggml.token_type"]
    assert types[:3] == [int(TokenType.CONTROL)] * 3
    assert types[NUM_IDS:] == [int(TokenType.UNUSED)] * 8
    assert fields["tokenizer.ggml.tokens"][NUM_IDS] == f"[PAD{NUM_IDS}]"


def test_tokenizer_read_from_the_file_gives_the_same_ids(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    write_gguf(
        tmp_path / "model.gguf", make_model(vocab_size=NUM_IDS), tokenizer, file_type="f16", name="tiny"
    )
    loaded = AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
    for text in TEXTS:
        assert loaded.encode(text) == tokenizer.encode(text)
    if HAS_GGUF_CONFIG:  # the reader of 5.16 takes the token that begins a text for the one that ends it
        assert loaded.eos_token == tokenizer.eos_token


def test_llama3_factors_are_transformers_own() -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    }
    config = AutoConfig.for_model(
        "llama", hidden_size=256, num_attention_heads=4, max_position_embeddings=4096, rope_parameters=rope
    )
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, device="cpu")
    plain = 1 / 5e5 ** (torch.arange(0, 64, 2) / 64)
    np.testing.assert_allclose(llama3_factors(config), (plain / scaled).numpy(), rtol=1e-4)


def test_pre_tokenizers_are_known_by_structure_or_refused() -> None:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
    digits = {"type": "Digits", "individual_digits": True}
    assert pre_tokenizer_name({"pre_tokenizer": byte_level}) == "gpt-2"
    assert (
        pre_tokenizer_name({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [digits, byte_level]}})
        == "smollm"
    )
    for pattern, name in NAME_OF_PATTERN.items():
        steps = [{"type": "Split", "pattern": {"Regex": pattern}}, {**byte_level, "use_regex": False}]
        content = {
            "normalizer": {"type": "NFC"},
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        }
        assert pre_tokenizer_name(content) == name
    for wrong in ({**byte_level, "add_prefix_space": True}, {"type": "Whitespace"}, None):
        with pytest.raises(ValueError, match=r"no name for this pre-tokenizer.*convert_hf_to_gguf"):
            pre_tokenizer_name({"pre_tokenizer": wrong})


def test_what_cannot_be_written_is_refused_with_the_way_out(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    path = tmp_path / "model.gguf"
    with pytest.raises(ValueError, match=r"not 'gpt2'.*convert_hf_to_gguf"):
        write_gguf(path, make_model("gpt2", vocab_size=NUM_IDS), tokenizer, file_type="f16", name="tiny")
    with pytest.raises(ValueError, match="this one is WordLevel"):
        write_gguf(path, make_model(), make_tokenizer(), file_type="f16", name="tiny")
    large = make_model(vocab_size=NUM_IDS)
    large.model.embed_tokens.weight.data[5, 5] = 1e6
    with pytest.raises(ValueError, match=r"token_embd\.weight has values beyond half precision"):
        write_gguf(path, large, tokenizer, file_type="f16", name="tiny")
    assert not path.exists()


def test_the_command_writes_both_models_and_the_start_line(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, capsys: pytest.CaptureFixture[str]
) -> None:
    target = save(tmp_path / "target", make_model(vocab_size=NUM_IDS, num_layers=3), tokenizer)
    draft = save(tmp_path / "draft", make_model(vocab_size=NUM_IDS), tokenizer)
    (draft / "draftsmith.json").write_text(json.dumps({"best_gamma": 2, "vocab_shortlist": None}))
    with pytest.raises(SystemExit) as left:
        main([str(target), str(draft), "--out", str(tmp_path / "out")])
    assert left.value.code == 0
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        *(f"{who}-{kind}.gguf" for who in ("target", "draft") for kind in ("f16", "q8_0")),
        "pair.json",
        "llama-server.sh",
    }
    assert "--spec-draft-n-max 2" in (tmp_path / "out" / "llama-server.sh").read_text()
    with pytest.raises(SystemExit) as left:
        main([str(target), "--out", str(tmp_path / "out")])
    assert left.value.code == 2
    assert "one target and one draft are needed" in capsys.readouterr().err
