"""Are the weight files of a model folder whole and finite? Headers and one tensor at a time, never the whole model.

Some faults only show once it is loaded; those are looked for then.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel

from pipeline.compat import ERROR, WARNING, Finding, read_json

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
SHARD_NAME = re.compile(r"-(\d{5})-of-(\d{5})\.safetensors$")
ADAPTER_CONFIG = "adapter_config.json"
#: Ids that a loaded model is tried on.
NUM_TRIED_IDS = 8
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that `from_pretrained` reads: the single file, or else those of the index."""
    if (folder / SINGLE_NAME).is_file():
        return [folder / SINGLE_NAME]
    if (folder / INDEX_NAME).is_file():
        return [folder / name for name in sorted(set(_weight_map(folder).values()))]
    return sorted(folder.glob("*.safetensors"))


def _weight_map(folder: Path) -> dict[str, str]:
    """File by tensor, as the index says; empty without an index. Raises ValueError for a broken one."""
    named: dict[str, str] = read_json(folder / INDEX_NAME).get("weight_map", {})
    return named


def _check_names(folder: Path, files: list[Path], *, who: str) -> list[Finding]:
    """Shards without their index, or fewer than their names say: such a folder does not load. Two sets of weights: engines differ."""
    if files == [folder / SINGLE_NAME]:
        return _check_stale_index(folder, who=who)
    shards = [found for path in files if (found := SHARD_NAME.search(path.name))]
    if (folder / INDEX_NAME).is_file() or not shards:
        return []
    num_named = int(shards[0].group(2))
    message = (
        f"the {who}'s weights are {len(shards)} of {num_named} shards, and {INDEX_NAME}, which says what lies where, is missing: "
        "download or write the model again"
    )
    return [Finding("broken_shard", ERROR, message)]


def _check_stale_index(folder: Path, *, who: str) -> list[Finding]:
    if set(_weight_map(folder).values()) <= {SINGLE_NAME}:
        return []
    message = (
        f"the {who}'s folder holds {SINGLE_NAME} and {INDEX_NAME}, which names other files: Transformers reads the first, vLLM the "
        "others. Remove those that are not the model's"
    )
    return [Finding("two_weights", WARNING, message)]


def pickle_files(folder: Path) -> list[Path]:
    """Files that would run code when they are loaded."""
    return sorted(path for path in folder.rglob("*") if path.suffix in PICKLE_SUFFIXES)


def refuse_adapter(folder: Path, *, field: str) -> None:
    """Raise ValueError for a folder of PEFT, which holds what was added to a model, and not the model."""
    adapter = folder / ADAPTER_CONFIG
    if not adapter.is_file() or any(any(folder.glob(names)) for names in ("model*.safetensors", "pytorch_model*.bin")):
        return
    base = read_json(adapter).get("base_model_name_or_path")
    raise ValueError(
        f"{field}={str(folder)!r}: the folder holds a PEFT adapter{f' of {base}' if base else ''} and no model: merge the two once "
        "(PeftModel.from_pretrained(model, adapter).merge_and_unload()), save the result with its tokenizer, and name that folder"
    )


def check_loaded(model: PreTrainedModel, *, who: str) -> list[Finding]:
    """What the files do not show: numbers that the dtype of loading does not hold, pickled ones, and a head beside its tie."""
    dtype = str(model.dtype).removeprefix("torch.")
    bad = next((name for name, tensor in model.named_parameters() if _num_not_finite(tensor)), None)
    if bad is None:
        ids_BT = torch.arange(NUM_TRIED_IDS, device=model.device).unsqueeze(0)
        with torch.no_grad():
            bad = "logits" if bool(model(input_ids=ids_BT).logits.isnan().any()) else None
    if bad is not None:
        message = (
            f"the {who}'s {bad} hold NaN or infinite values in {dtype}, so whatever it gives there means nothing: use bfloat16 or float32 "
            "(for the doctor --dtype), or, where the model was made for this dtype, train or download it again"
        )
        return [Finding("non_finite_weights", ERROR, message)]
    return _check_tie(model, who=who)


def _check_tie(model: PreTrainedModel, *, who: str) -> list[Finding]:
    """Transformers leaves a head with values of its own alone, whatever the config says; vLLM reads the embeddings twice."""
    if not has_untied_head(model) or not model.config.get_text_config().tie_word_embeddings:
        return []
    message = (
        f"the {who}'s config.json says that its head is its embeddings (tie_word_embeddings=true), but its files hold a head with other "
        "values: Transformers uses that head, vLLM the embeddings. Set tie_word_embeddings to false there, or remove the head"
    )
    return [Finding("untied_head", WARNING, message)]


def has_untied_head(model: PreTrainedModel) -> bool:
    """Whether the output head has rows of its own."""
    head = model.get_output_embeddings()
    return head is not None and head.weight is not model.get_input_embeddings().weight


def check_weight_files(folder: Path, *, who: str, check_values: bool = True) -> list[Finding]:
    """Every shard present, readable, complete by the index, and (with `check_values`) finite."""
    try:
        files = weight_files(folder)
        _weight_map(folder)
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
    num_bad = _num_not_finite(tensor)
    if num_bad == 0:
        return []
    message = (
        f"the {who}'s tensor {name!r} in {path.name} has {num_bad} NaN or infinite values: train or download it again"
    )
    return [Finding("non_finite_weights", ERROR, message)]


def _num_not_finite(tensor: torch.Tensor) -> int:
    if not tensor.is_floating_point():
        return 0
    # PyTorch compares no eight-bit floats.
    values = tensor.float() if tensor.element_size() == 1 else tensor
    return int((~torch.isfinite(values)).sum())


def _tensors(path: Path, *, load: bool) -> Iterator[tuple[str, torch.Tensor | None]]:
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 (not a dict)
            yield name, file.get_tensor(name) if load else None


def _check_index(folder: Path, found: set[str], *, who: str) -> list[Finding]:
    if (folder / SINGLE_NAME).is_file():
        return []
    absent = sorted(set(_weight_map(folder)) - found)
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
