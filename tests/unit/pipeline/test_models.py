"""Finding and loading models: content revisions, and a clear refusal of what is no target."""

import importlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub.errors import HfHubHTTPError
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertForMaskedLM, T5Config, T5ForConditionalGeneration

from pipeline import models
from pipeline.models import (
    MissingPackageError,
    check_causal_lm,
    content_revision,
    load_causal_lm,
    load_tokenizer,
    obtain_model,
    resolve_target,
)
from pipeline.random_target import build_tokenizer, obtain_random_target
from pipeline.schema import Config, RandomModelConfig, TargetConfig


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return obtain_random_target(RandomModelConfig(), tmp_path / "models")


def config_of(path: Path | str, tmp_path: Path) -> Config:
    return Config(artifacts_dir=str(tmp_path), target=TargetConfig(name="mine", path=str(path)))


def test_random_target_is_made_once_and_depends_on_its_settings(tmp_path: Path, folder: Path) -> None:
    made = (folder / "model.safetensors").stat().st_mtime_ns
    assert obtain_random_target(RandomModelConfig(), tmp_path / "models") == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == made
    again = obtain_random_target(RandomModelConfig(), tmp_path / "elsewhere")
    assert content_revision(again) == content_revision(folder)
    other = obtain_random_target(RandomModelConfig(seed=1), tmp_path / "models")
    assert other != folder and content_revision(other) != content_revision(folder)


def test_half_made_random_target_is_made_again(tmp_path: Path, folder: Path) -> None:
    folder.rename(folder.with_name(folder.name + ".incomplete"))
    (folder.with_name(folder.name + ".incomplete") / "model.safetensors").write_bytes(b"half")
    load_causal_lm(str(obtain_random_target(RandomModelConfig(), tmp_path / "models")), "float32")


@pytest.mark.parametrize(
    "settings", [{"vocab_size": 100}, {"vocab_size": 5000}, {"hidden_size": 30}, {"num_kv_heads": 3}]
)
def test_random_target_refuses_sizes_that_do_not_fit(tmp_path: Path, settings: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        obtain_random_target(RandomModelConfig(**settings), tmp_path)


@pytest.mark.parametrize("vocab_size", [259, 320, 600])
def test_tokenizer_has_every_id_and_loses_nothing(vocab_size: int) -> None:
    tokenizer = build_tokenizer(vocab_size)
    text = "the Anteater\n said: „Größe 12“ 🙂\t{}  double"
    ids = tokenizer.encode(text)
    assert len(tokenizer) == vocab_size and tokenizer.decode(ids) == text and max(ids) < vocab_size
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 2
    assert tokenizer.encode("<|im_start|>user")[0] == 1


def test_resolve_target_takes_a_folder_and_follows_its_content(tmp_path: Path, folder: Path) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(folder, moved)
    first, second = (resolve_target(config_of(path, tmp_path)) for path in (folder, moved))
    assert first.revision == second.revision and first.path != second.path and first.name == "mine"
    weights = load_file(moved / "model.safetensors")
    weights["model.norm.weight"][3] += 1
    save_file(weights, moved / "model.safetensors", metadata={"format": "pt"})
    assert resolve_target(config_of(moved, tmp_path)).revision != first.revision


def test_large_files_are_sampled_and_a_change_is_still_seen(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "_HASH_WHOLE_BELOW_BYTES", 1000)
    monkeypatch.setattr(models, "_BLOCK_BYTES", 64)
    before = content_revision(folder)
    assert content_revision(folder) == before
    weights = {name: tensor + 0.01 for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert content_revision(folder) != before


def test_loaded_model_is_ready_for_inference(folder: Path) -> None:
    model = load_causal_lm(str(folder), "bfloat16", device="cpu")
    assert not model.training and model.dtype == torch.bfloat16
    with pytest.raises(ValueError, match=r"dtype='int8'.*bfloat16"):
        load_causal_lm(str(folder), "int8")


@pytest.mark.parametrize("path", ["/no/such/folder", "./nothing", "no/such/deep/place"])
def test_missing_folder_is_named(tmp_path: Path, path: str) -> None:
    with pytest.raises(ValueError, match=rf"target\.path='{path}': no such folder"):
        resolve_target(config_of(path, tmp_path))


@pytest.mark.parametrize("path", ["nobody-at-all/no-such-model", "no-such-model-anywhere"])
def test_id_that_cannot_be_had_is_named(tmp_path: Path, path: str) -> None:
    with pytest.raises(ValueError, match=rf"target\.path='{path}'.*Check the name and the network"):
        resolve_target(config_of(path, tmp_path))


def test_without_a_network_an_id_comes_from_the_cache_or_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not offline by choice: the Hub's client then lets its HTTP library's own error through, which is no OSError."""
    library = importlib.import_module(HfHubHTTPError.__bases__[0].__module__.partition(".")[0])

    def unreachable(*_: object, **__: object) -> str:
        raise library.ConnectError("[Errno -2] Name or service not known")

    monkeypatch.setattr(models, "list_repo_files", unreachable)
    monkeypatch.setattr(models, "snapshot_download", lambda *_, **__: str(folder))
    assert obtain_model("org/cached") == folder
    monkeypatch.setattr(models, "snapshot_download", unreachable)
    with pytest.raises(ValueError, match=r"draft='org/other'.*Name or service.*Check the name and the network"):
        obtain_model("org/other", field="draft")


def test_a_folder_under_home_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shells leave the ~ in target.path=~/models/mine to the program."""
    monkeypatch.setenv("HOME", str(folder.parent))
    assert obtain_model(f"~/{folder.name}") == folder


def test_an_adapter_is_no_model_and_its_base_is_named(tmp_path: Path) -> None:
    """A folder that PEFT saved: config.json may be there too, the weights are only what was added."""
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base", "r": 8}')
    (tmp_path / "adapter_model.safetensors").write_bytes(b"x")
    for content in (None, '{"model_type": "llama"}'):
        if content:
            (tmp_path / "config.json").write_text(content)
        with pytest.raises(ValueError, match=r"a PEFT adapter of org/base and no model: merge"):
            check_causal_lm(tmp_path, field="draft")
    (tmp_path / "model.safetensors").write_bytes(b"x")
    check_causal_lm(tmp_path, field="draft")


def test_a_quantised_model_without_its_package_is_a_users_message(folder: Path) -> None:
    raw = json.loads((folder / "config.json").read_text())
    raw["quantization_config"] = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
    (folder / "config.json").write_text(json.dumps(raw))
    with pytest.raises(MissingPackageError, match=r"target\.path=.*cannot be loaded here: .*gptqmodel"):
        load_causal_lm(str(folder), "float32")


def test_models_that_are_no_causal_lm_are_refused(tmp_path: Path) -> None:
    bert = BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    BertForMaskedLM(bert).save_pretrained(tmp_path / "bert")
    t5 = T5Config(vocab_size=50, d_model=16, d_ff=16, d_kv=8, num_layers=1, num_heads=2)
    T5ForConditionalGeneration(t5).save_pretrained(tmp_path / "t5")
    for name in ("bert", "t5"):
        with pytest.raises(ValueError, match=rf"{name}.*no causal language model"):
            resolve_target(config_of(tmp_path / name, tmp_path))


def test_folder_without_config_or_with_a_broken_one(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no config\.json"):
        resolve_target(config_of(tmp_path, tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        resolve_target(config_of(tmp_path, tmp_path))


def test_own_code_is_refused_until_it_is_trusted(tmp_path: Path, folder: Path) -> None:
    raw = json.loads((folder / "config.json").read_text())
    raw |= {"model_type": "brandnew", "auto_map": {"AutoModelForCausalLM": "code.Model"}}
    (folder / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match="trust_remote_code"):
        resolve_target(config_of(folder, tmp_path))


def test_missing_tokenizer_is_named(tmp_path: Path, folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ValueError, match="no tokenizer"):
        resolve_target(config_of(folder, tmp_path))
    (folder / "tokenizer.json").write_text("not a tokenizer")
    with pytest.raises(ValueError, match="tokenizer cannot be loaded"):
        load_tokenizer(str(folder))


def test_missing_and_damaged_weights_are_refused(folder: Path) -> None:
    """Transformers would fill a missing weight with random numbers and go on."""
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"1 weights are missing.*layers\.1\.mlp\.up_proj"):
        load_causal_lm(str(folder), "float32")
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"target\.path"):
        load_causal_lm(str(folder), "float32")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"target\.path"):
        load_causal_lm(str(folder), "float32")
