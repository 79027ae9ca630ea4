"""Getting models: the target of a run, its content revision, and loading with clear errors."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional, cast

import torch
from huggingface_hub import list_repo_files, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from pipeline.embedded_target import obtain_embedded_target
from pipeline.random_target import obtain_random_target
from pipeline.schema import Config
from pipeline.weight_files import refuse_adapter

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tokenizer_config.json")
#: Why an id cannot be had. Without a network the Hub's client lets its HTTP library's errors through, which are no OSError;
#: the base of its own is the base of theirs.
_HUB_ERRORS: tuple[type[Exception], ...] = (
    HFValidationError,
    OSError,
    *cast(tuple[type[Exception], ...], HfHubHTTPError.__bases__),
)
_HASH_WHOLE_BELOW_BYTES = 2**29
_NUM_SAMPLED_BLOCKS = 256
_BLOCK_BYTES = 2**16


class MissingPackageError(ValueError):
    """A model that may well be whole, but that needs a package which is not installed here: kernels of a quantised one."""


@dataclass(frozen=True)
class ModelRef:
    """A model on disk: its folder, a short name, and a revision that follows its content (not its place)."""

    path: str
    name: str
    revision: str
    trust_remote_code: bool = False


def resolve_target(config: Config) -> ModelRef:
    """Make the target of `config` available as a local folder and check that it can serve as one.

    Without `target.path` it is the embedded target, or a seeded random one when `target.random` is set.

    Raises:
        ValueError: the model cannot be had, is no causal language model, or has no tokenizer.
    """
    target = config.target
    models_dir = Path(config.artifacts_dir) / "models"
    if target.path is not None:
        folder = obtain_model(target.path, field="target.path", revision=target.revision)
    elif target.random is not None:
        folder = obtain_random_target(target.random, models_dir)
    else:
        folder = obtain_embedded_target(models_dir)
    check_causal_lm(folder, field="target.path", trust_remote_code=target.trust_remote_code)
    load_tokenizer(str(folder), trust_remote_code=target.trust_remote_code)
    return ModelRef(str(folder), target.name, content_revision(folder), target.trust_remote_code)


def obtain_model(path: str, *, field: str = "path", revision: Optional[str] = None) -> Path:
    """Return the local folder of a Hugging Face id or of a folder; an id is downloaded or taken from the cache.

    Raises:
        ValueError: there is no such folder, no such id, or the network is away and the cache lacks it.
    """
    # A shell leaves the ~ of target.path=~/models/mine as it is.
    folder = Path(path).expanduser() if path.startswith("~/") else Path(path)
    if folder.is_dir():
        return folder
    looks_local = path.startswith(("/", ".", "~")) or path.count("/") != 1
    if looks_local and not _is_single_name_id(path):
        raise ValueError(
            f"{field}={path!r}: no such folder; give a folder with config.json or a Hugging Face id"
        )
    try:
        return Path(
            snapshot_download(path, revision=revision, ignore_patterns=_ignored_files(path, revision))
        )
    except _HUB_ERRORS as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(
            f"{field}={path!r}: neither a local folder nor a Hugging Face model that can be had from here ({reason}). "
            "Check the name and the network, log in for a gated model, or give a local folder."
        ) from error


def _is_single_name_id(path: str) -> bool:
    """Ids such as `gpt2` have no owner; anything with a path separator or a dot in front is a place on disk."""
    return bool(path) and "/" not in path and not path.startswith((".", "~"))


def _ignored_files(repo_id: str, revision: Optional[str]) -> list[str]:
    """Other frameworks' weights are never fetched; pickled ones only where there are no safetensors."""
    ignored = ["*.gguf", "*.onnx", "*.h5", "*.msgpack", "*.ot", "original/*", "onnx/*", "*.tflite"]
    try:
        has_safetensors = any(
            name.endswith(".safetensors") for name in list_repo_files(repo_id, revision=revision)
        )
    except _HUB_ERRORS:
        has_safetensors = True
    return [*ignored, "*.bin", "*.pt", "*.pth"] if has_safetensors else ignored


def check_causal_lm(folder: Path, *, field: str, trust_remote_code: bool = False) -> None:
    """Refuse, before any weight is read, a folder that AutoModelForCausalLM would not load as it was trained.

    Raises:
        ValueError: an adapter, no config.json, an unknown architecture, or an architecture that is no causal LM.
    """
    refuse_adapter(folder, field=field)
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"{field}={str(folder)!r}: the folder has no config.json, so it is no Hugging Face model folder"
        )
    try:
        raw = json.loads((folder / "config.json").read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{field}={str(folder)!r}: config.json is not valid JSON ({error})") from error
    if "AutoModelForCausalLM" in raw.get("auto_map", {}) and not _known_type(raw):
        if trust_remote_code:
            return
        raise ValueError(
            f"{field}={str(folder)!r}: the model brings its own code; set target.trust_remote_code=true if you trust it"
        )
    architectures = raw.get("architectures") or []
    known = _flatten(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    if not _known_type(raw) or (architectures and not set(architectures) & known):
        raise ValueError(
            f"{field}={str(folder)!r}: model_type={raw.get('model_type')!r} with architectures={architectures} is no "
            "causal language model that Transformers knows; a target must load with AutoModelForCausalLM"
        )


def _known_type(raw_config: dict[str, Any]) -> bool:
    return raw_config.get("model_type") in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def _flatten(names: Any) -> set[str]:
    return {one for name in names for one in ((name,) if isinstance(name, str) else name)}


def default_device() -> str:
    """`cuda` where there is one, else `cpu`."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def load_causal_lm(
    path: str,
    dtype: str = "bfloat16",
    trust_remote_code: bool = False,
    *,
    device: Optional[str] = None,
    field: str = "target.path",
) -> PreTrainedModel:
    """Load a causal LM for inference (`eval()`), every weight from its files, on `device` (default: `default_device()`).

    Raises:
        ValueError: unknown dtype, not a causal LM, unreadable weights, or weights missing from the files;
            MissingPackageError where loading needs what is not installed.
    """
    if dtype not in DTYPES:
        raise ValueError(f"target.dtype={dtype!r}: choose from {sorted(DTYPES)}")
    check_causal_lm(Path(path), field=field, trust_remote_code=trust_remote_code)
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            path, dtype=DTYPES[dtype], trust_remote_code=trust_remote_code, output_loading_info=True
        )
    except ImportError as error:
        raise MissingPackageError(f"{field}={path!r}: the model cannot be loaded here: {error}") from error
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise ValueError(f"{field}={path!r}: the model cannot be loaded: {error}") from error
    except Exception as error:
        # safetensors has an exception type of its own for a truncated file; it derives from Exception directly.
        if type(error).__name__ != "SafetensorError":
            raise
        raise ValueError(f"{field}={path!r}: a weight file is damaged: {error}") from error
    if info["missing_keys"]:
        missing = sorted(info["missing_keys"])
        raise ValueError(
            f"{field}={path!r}: {len(missing)} weights are missing from its files, such as {missing[:3]}: "
            "they would be random. The folder is incomplete or its architecture is another one."
        )
    loaded: PreTrainedModel = model.to(device or default_device()).eval()
    return loaded


def load_tokenizer(
    path: str, trust_remote_code: bool = False, *, field: str = "target.path"
) -> PreTrainedTokenizerBase:
    """Load the tokenizer exactly as it lies in the folder (no pad token is invented).

    Raises:
        ValueError: the folder has no tokenizer or it cannot be read.
    """
    if not any((Path(path) / name).is_file() for name in TOKENIZER_FILES):
        raise ValueError(
            f"{field}={path!r}: the folder has no tokenizer (none of {', '.join(TOKENIZER_FILES)}): copy the files of the one "
            "that its model was trained with into it"
        )
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            path, trust_remote_code=trust_remote_code
        )
    except Exception as error:
        # Tokenizer files fail in many ways (JSON, Rust, missing sentencepiece); all of them are the folder's fault.
        raise ValueError(f"{field}={path!r}: the tokenizer cannot be loaded: {error}") from error
    if len(tokenizer) == 0:
        raise ValueError(f"{field}={path!r}: the tokenizer is empty")
    return tokenizer


def content_revision(folder: Path) -> str:
    """Sha256 (hex) over what decides the model's behaviour: configs, tokenizer, code and weights; not names or times.

    Weight files above 512 MiB count by size, header and 256 evenly spaced blocks, so that a change of a fine-tune
    is seen within a second whatever the model's size.
    """
    suffixes = (".json", ".safetensors", ".bin", ".jinja", ".model", ".txt", ".py", ".tiktoken")
    ignored = {"conversion.json", "draftsmith.json", "stage.json"}
    digest = hashlib.sha256()
    for file in sorted(folder.iterdir(), key=lambda item: item.name):
        if file.is_file() and file.suffix in suffixes and file.name not in ignored:
            digest.update(file.name.encode() + b"\0" + _file_digest(file))
    return digest.hexdigest()


def _file_digest(file: Path) -> bytes:
    size = file.stat().st_size
    with file.open("rb") as stream:
        if size < _HASH_WHOLE_BELOW_BYTES:
            return hashlib.file_digest(stream, "sha256").digest()
        digest = hashlib.sha256(str(size).encode())
        digest.update(stream.read(2**20))
        for index in range(_NUM_SAMPLED_BLOCKS):
            stream.seek((size - _BLOCK_BYTES) * index // (_NUM_SAMPLED_BLOCKS - 1))
            digest.update(stream.read(_BLOCK_BYTES))
        return digest.digest()
