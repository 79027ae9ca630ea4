"""Are the weight files of a model folder whole and finite? Headers and one tensor at a time, never the whole model."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from pipeline.compat import ERROR, WARNING, Finding, read_json

INDEX_NAME = "model.safetensors.index.json"
SHARD_NAME = re.compile(r"-(\d{5})-of-(\d{5})\.safetensors$")
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that `from_pretrained` reads: those of the index, or the single file."""
    if (folder / INDEX_NAME).is_file():
        index = read_json(folder / INDEX_NAME).get("weight_map", {})
        return [folder / name for name in sorted(set(index.values()))]
    return sorted(folder.glob("*.safetensors"))


def _check_names(folder: Path, files: list[Path], *, who: str) -> list[Finding]:
    """Shards without their index, or fewer than their names say: such a folder does not load."""
    shards = [found for path in files if (found := SHARD_NAME.search(path.name))]
    if (folder / INDEX_NAME).is_file() or not shards or (folder / "model.safetensors").is_file():
        return []
    num_named = int(shards[0].group(2))
    message = (
        f"the {who}'s weights are {len(shards)} of {num_named} shards, and {INDEX_NAME}, which says what lies where, is missing: "
        "download or write the model again"
    )
    return [Finding("broken_shard", ERROR, message)]


def pickle_files(folder: Path) -> list[Path]:
    """Files that would run code when they are loaded."""
    return sorted(path for path in folder.rglob("*") if path.suffix in PICKLE_SUFFIXES)


def check_weight_files(folder: Path, *, who: str, check_values: bool = True) -> list[Finding]:
    """Every shard present, readable, complete by the index, and (with `check_values`) finite."""
    try:
        files = weight_files(folder)
    except ValueError as error:
        message = f"the {who}'s weight index is broken: {error}. Download or write the model again"
        return [Finding("broken_shard", ERROR, message)]
    if not files:
        return [_without_files(folder, who=who)]
    findings = _check_names(folder, files, who=who)
    found: set[str] = set()
    for path in files:
        try:
            for name, tensor in _tensors(path, load=check_values):
                found.add(name)
                findings += [] if tensor is None else _check_finite(tensor, name, path, who=who)
        except (SafetensorError, OSError, json.JSONDecodeError) as error:
            message = f"the {who}'s weight file {path} cannot be read ({error}): download or write the model again"
            findings.append(Finding("broken_shard", ERROR, message))
    if not findings:
        findings.extend(_check_index(folder, found, who=who))
    return findings


def _without_files(folder: Path, *, who: str) -> Finding:
    if not pickle_files(folder):
        return Finding("missing_weights", ERROR, f"the {who}'s folder {folder} holds no *.safetensors file")
    message = f"the {who} in {folder} has pickled weights only: save it once with save_pretrained to get safetensors"
    return Finding("pickle_weights", WARNING, message)


def _check_finite(tensor: torch.Tensor, name: str, path: Path, *, who: str) -> list[Finding]:
    num_bad = int((~torch.isfinite(tensor)).sum()) if tensor.is_floating_point() else 0
    if num_bad == 0:
        return []
    message = (
        f"the {who}'s tensor {name!r} in {path.name} has {num_bad} NaN or infinite values: train or download it again"
    )
    return [Finding("non_finite_weights", ERROR, message)]


def _tensors(path: Path, *, load: bool) -> Iterator[tuple[str, torch.Tensor | None]]:
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 (not a dict)
            yield name, file.get_tensor(name) if load else None


def _check_index(folder: Path, found: set[str], *, who: str) -> list[Finding]:
    named = set(read_json(folder / INDEX_NAME).get("weight_map", {}))
    absent = sorted(named - found)
    if not absent:
        return []
    return [
        Finding(
            "broken_shard",
            ERROR,
            f"the {who}'s index {INDEX_NAME} names {len(absent)} tensors that no shard holds, the first is {absent[0]!r}: "
            "download or write the model again",
        )
    ]
