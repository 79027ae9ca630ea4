"""Finding and loading models: content revisions, and a clear refusal of what is no target."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertForMaskedLM, T5Config, T5ForConditionalGeneration

from pipeline import models
from pipeline.models import content_revision, load_causal_lm, load_tokenizer, resolve_target
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
