"""Findings for pairs that do not fit, one fault at a time."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.compat import (
    Finding,
    check_context_length,
    check_generation_config,
    check_rope,
    check_shapes,
    demote,
    errors,
    raise_on_errors,
)
from pipeline.models import load_causal_lm
from pipeline.pair import check_pair, check_start_draft
from pipeline.weight_files import check_loaded, check_weight_files
from tests.unit.pipeline.tiny_models import FAMILIES, make_model, make_tokenizer, save


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return save(tmp_path / "target", make_model(num_layers=3))


def codes(findings: list[Finding]) -> set[str]:
    return {finding.code for finding in findings if finding.severity == "error"}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_good_pair_of_each_family_has_no_findings(tmp_path: Path, target: Path, family: str) -> None:
    draft = save(tmp_path / "draft", make_model(family))
    assert check_pair(target, draft) == []


def test_other_tokenizer_of_the_same_size_is_refused_and_named(tmp_path: Path, target: Path) -> None:
    """vllm 42775, sglang 24051: same vocabulary size, other tokens."""
    draft = save(tmp_path / "draft", make_model(), make_tokenizer(swap=True))
    findings = check_pair(target, draft)
    assert codes(findings) == {"tokenizer"}
    assert "2 tokens have other ids" in findings[0].message
    assert "'w10' (target 10, draft 20)" in findings[0].message
    with pytest.raises(ValueError, match=r"draft\.path"):
        raise_on_errors(check_start_draft(target, draft))


def test_swapped_special_tokens_are_found(tmp_path: Path, target: Path) -> None:
    draft = save(tmp_path / "draft", make_model(), make_tokenizer(eos="<s>"))
    findings = check_pair(target, draft)
    assert codes(findings) == {"special_tokens"}
    assert "eos_token (target '</s>', draft '<s>')" in findings[0].message


def test_padded_vocabulary_is_no_other_tokenizer(tmp_path: Path, target: Path) -> None:
    """trl 3028, vllm 7252: same ids, padded width."""
    draft = save(tmp_path / "draft", make_model(vocab_size=104))
    assert codes(check_pair(target, draft)) == {"vocab_padding"}
    assert errors(check_start_draft(target, draft)) == []


def test_head_narrower_than_the_tokenizer_is_refused(tmp_path: Path, target: Path) -> None:
    draft = save(tmp_path / "draft", make_model(vocab_size=90))
    assert codes(check_pair(target, draft)) == {"vocab_size"}
    assert codes(check_start_draft(target, draft)) == {"vocab_size"}


def test_shorter_context_names_the_crossing_point(tmp_path: Path, target: Path) -> None:
    """SpecForge 271, vllm 58080: a context longer than the draft's."""
    findings = check_pair(target, save(tmp_path / "draft", make_model("gpt2", context=64)))
    assert codes(findings) == {"context_length"}
    assert "from position 64 on" in findings[0].message


def test_missing_chat_template_counts_only_when_chat_is_asked_for(tmp_path: Path, target: Path) -> None:
    draft = save(tmp_path / "draft", make_model(), make_tokenizer(template=None))
    assert codes(check_pair(target, draft)) == {"chat_template"}
    assert check_pair(target, draft, chat=False) == []


def test_penalty_in_generation_config_is_found(tmp_path: Path, target: Path) -> None:
    """Soup 345: draft == target scored .862 because of a repetition penalty in generation_config."""
    draft = save(tmp_path / "draft", make_model())
    path = draft / "generation_config.json"
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"repetition_penalty": 1.05, "no_repeat_ngram_size": 0})
    )
    findings = check_pair(target, draft)
    assert codes(findings) == {"penalty"}
    assert "{'repetition_penalty': 1.05}" in findings[0].message
    assert check_generation_config({"temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.0}) == []


def test_nan_weights_are_found_and_the_tensor_is_named(tmp_path: Path, target: Path) -> None:
    draft = save(tmp_path / "draft", make_model())
    weights = load_file(draft / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] = torch.nan
    save_file(weights, draft / "model.safetensors", metadata={"format": "pt"})
    findings = check_pair(target, draft)
    assert codes(findings) == {"non_finite_weights"}
    assert "model.layers.1.mlp.up_proj.weight" in findings[0].message
    assert "1 NaN" in findings[0].message


def test_cut_missing_and_incomplete_shards_are_found(tmp_path: Path) -> None:
    folder = save(tmp_path / "draft", make_model(), max_shard_size="20KB")
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) > 2
    assert check_weight_files(folder, who="draft") == []
    whole = shards[0].read_bytes()
    shards[0].write_bytes(whole[: len(whole) // 2])
    found = check_weight_files(folder, who="draft")
    assert codes(found) == {"broken_shard"}
    assert shards[0].name in found[0].message
    shards[0].unlink()
    assert codes(check_weight_files(folder, who="draft")) == {"broken_shard"}
    shards[0].write_bytes(shards[1].read_bytes())
    assert "no shard holds" in check_weight_files(folder, who="draft")[0].message


def test_a_single_file_beside_an_older_index_is_what_is_read(tmp_path: Path) -> None:
    """Saved anew as one file over shards: Transformers reads the one, vLLM follows the index."""
    folder = save(tmp_path / "draft", make_model(), max_shard_size="20KB")
    first, *others = sorted(folder.glob("model-*.safetensors"))
    weights = {name: tensor for path in (first, *others) for name, tensor in load_file(path).items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    first.unlink()
    [finding] = check_weight_files(folder, who="draft")
    assert (finding.code, finding.severity) == ("two_weights", "warning")
    assert load_causal_lm(str(folder), "float32", device="cpu").num_parameters() > 0
    weights["model.norm.weight"][0] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert codes(check_weight_files(folder, who="draft")) == {"non_finite_weights"}


def test_folder_without_weights_or_with_pickles_only(tmp_path: Path) -> None:
    assert codes(check_weight_files(tmp_path, who="draft")) == {"missing_weights"}
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    found = check_weight_files(tmp_path, who="draft")
    assert [finding.code for finding in found] == ["pickle_weights"]
    assert codes(found) == set()


def test_missing_folder_and_broken_config_are_findings(tmp_path: Path, target: Path) -> None:
    assert "missing_model" in codes(check_pair(target, tmp_path / "nowhere"))
    draft = save(tmp_path / "draft", make_model())
    (draft / "config.json").write_text("{")
    assert "broken_config" in codes(check_pair(target, draft))


def test_a_folder_without_a_tokenizer_has_none_and_not_another_one(tmp_path: Path, target: Path) -> None:
    """vllm 42775's kind: of some families Transformers makes an empty one, from which each of the target's tokens differs."""
    make_model("qwen2").save_pretrained(tmp_path / "draft")
    findings = check_pair(target, tmp_path / "draft")
    assert codes(findings) == {"broken_tokenizer"}
    assert "the folder has no tokenizer" in findings[0].message


def test_an_adapter_is_named_as_such(tmp_path: Path, target: Path) -> None:
    make_tokenizer().save_pretrained(tmp_path / "draft")
    (tmp_path / "draft" / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')
    save_file({"lora_A": torch.ones(2)}, tmp_path / "draft" / "adapter_model.safetensors")
    findings = check_pair(target, tmp_path / "draft")
    assert codes(findings) == {"broken_config"} and "a PEFT adapter of org/base" in findings[0].message


def test_a_template_that_cannot_write_a_question_is_found(tmp_path: Path, target: Path) -> None:
    """speculators 801: a template's own error is the user's to know, not the end of a run."""
    broken = "{% if messages[0]['role'] != 'system' %}{{ raise_exception('a system prompt is needed') }}{% endif %}"
    other = save(tmp_path / "other", make_model(num_layers=3), make_tokenizer(template=broken))
    findings = check_pair(other, target)
    assert codes(findings) == {"chat_template"}
    assert "a system prompt is needed" in errors(findings)[0].message and "--plain-text" in errors(findings)[0].message
    assert codes(check_pair(target, other)) == set()  # engines write prompts with the target's
    assert codes(check_pair(other, target, chat=False)) == set()


def test_a_context_that_yarn_stretches_is_the_longer_one() -> None:
    """SpecForge 271: Qwen's YaRN settings are added beside an unchanged max_position_embeddings; vLLM serves factor times it."""
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}
    plain, stretched = make_model("qwen2").config, make_model("qwen2", rope=yarn).config
    [finding] = check_context_length(stretched, plain)
    assert "reads 128 positions and the target 512" in finding.message
    assert check_context_length(stretched, stretched) == check_context_length(plain, stretched) == []
    written_in = make_model("qwen2", rope=yarn | {"original_max_position_embeddings": 32}).config
    assert check_context_length(written_in, plain) == []


def test_eight_bit_floats_are_searched_too(tmp_path: Path) -> None:
    """A quantised model's weights: PyTorch has no isfinite for them."""
    values = torch.ones(4)
    for name, code in (("whole", None), ("broken", "non_finite_weights")):
        folder = tmp_path / name
        folder.mkdir()
        save_file({"weight": values.to(torch.float8_e4m3fn)}, folder / "model.safetensors")
        assert [found.code for found in check_weight_files(folder, who="draft")] == ([code] if code else [])
        values[1] = torch.nan


def test_what_only_the_loaded_model_shows(tmp_path: Path) -> None:
    """Finite in its file, infinite in half precision; and values that overflow on the way to the logits."""
    model = make_model()
    assert check_loaded(model, who="draft") == []
    model.model.norm.weight.data[0] = 1e5
    assert check_loaded(model, who="draft") == []
    [finding] = check_loaded(model.half(), who="draft")
    assert (finding.code, finding.severity) == ("non_finite_weights", "error")
    assert "model.norm.weight hold NaN or infinite values in float16" in finding.message
    model = make_model().half()
    model.model.layers[0].mlp.down_proj.weight.data.fill_(6e4)
    model.model.layers[0].mlp.up_proj.weight.data.fill_(6e4)
    assert "the target's logits hold NaN" in check_loaded(model, who="target")[0].message


def test_a_head_beside_its_tie_is_said(tmp_path: Path) -> None:
    """Transformers keeps a head with values of its own, vLLM follows tie_word_embeddings: acceptance promised by the one."""
    folder = save(tmp_path / "draft", make_model(tied=True))
    assert check_loaded(load_causal_lm(str(folder), "float32", device="cpu"), who="draft") == []
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].flip(0)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    [finding] = check_loaded(load_causal_lm(str(folder), "float32", device="cpu"), who="draft")
    assert (finding.code, finding.severity) == ("untied_head", "warning")


def test_shapes_and_rope() -> None:
    config = make_model().config
    assert check_shapes(config) == []
    config.num_key_value_heads = 3
    assert codes(check_shapes(config)) == {"head_shape"}
    config.num_key_value_heads, config.head_dim = 2, 12
    assert [finding.severity for finding in check_shapes(config)] == ["warning"]
    other = make_model().config
    other.rope_parameters = {"rope_type": "default", "rope_theta": 5.0}
    assert [finding.code for finding in check_rope(make_model().config, other)] == ["rope"]


def test_demote_changes_only_the_named_codes() -> None:
    found = [Finding("a", "error", "x"), Finding("b", "error", "y")]
    assert [finding.severity for finding in demote(found, ["a"])] == ["warning", "error"]
    with pytest.raises(ValueError, match=r"^y$"):
        raise_on_errors(demote(found, ["a"]))
