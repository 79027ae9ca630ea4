"""Shapes of models for planning: from a name or from a folder's config.json; weights are never read."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

from transformers import AutoConfig, PreTrainedConfig

from eval.shapes import SHAPES, Shape

#: Published names, without owner and `-instruct`, of the shapes in `eval/shapes.py`.
NAMES = {
    "llama-3.1-70b": "llama3_70b",
    "llama-3.3-70b": "llama3_70b",
    "llama-3.1-8b": "llama3_8b",
    "llama-3.2-1b": "llama3_2_1b",
    "qwen2.5-7b": "qwen2_5_7b",
    "smollm2-135m": "smollm2_135m",
    "draft-0.5b": "draft_0_5b",
}
LAYERS = "layers:"


@dataclass(frozen=True)
class Family:
    """What an architecture has beside its matrices. None: as `attention_bias` or `mlp_bias` of the config say."""

    has_qkv_bias: bool | None = None
    has_output_bias: bool | None = None
    has_mlp_bias: bool | None = None
    num_layer_norms: int = 2
    has_qk_norm: bool = False


#: Dense decoders with a gated MLP (three matrices) and grouped-query attention; by `model_type`.
FAMILIES = {
    "llama": Family(),
    "granite": Family(),
    "smollm3": Family(),
    "mistral": Family(False, False, False),
    "qwen2": Family(True, False, False),
    "qwen3": Family(None, None, False, has_qk_norm=True),
    "gemma": Family(None, None, False),
    "gemma2": Family(None, None, False, num_layer_norms=4),
    "gemma3_text": Family(None, None, False, num_layer_norms=4, has_qk_norm=True),
}


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder; `num_layer_norms` counts those over the hidden size in one layer."""

    name: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    is_tied: bool
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    has_mlp_bias: bool = False
    num_layer_norms: int = 2
    has_qk_norm: bool = False

    @property
    def query_size(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_size

    @property
    def kv_size(self) -> int:
        """Width of all key heads together, and of all value heads."""
        return self.num_kv_heads * self.head_size

    @property
    def layer_matrix_parameters(self) -> int:
        """Query, key, value and output matrices, and the three of the MLP."""
        return 2 * self.hidden_size * (self.query_size + self.kv_size) + 3 * self.hidden_size * self.intermediate_size

    @property
    def layer_parameters(self) -> int:
        """All of one layer: matrices, biases and norms."""
        biases = self.has_qkv_bias * (self.query_size + 2 * self.kv_size) + self.has_output_bias * self.hidden_size
        biases += self.has_mlp_bias * (2 * self.intermediate_size + self.hidden_size)
        norms = self.num_layer_norms * self.hidden_size + self.has_qk_norm * 2 * self.head_size
        return self.layer_matrix_parameters + biases + norms

    @property
    def head_parameters(self) -> int:
        """The output head, which is as large as the embedding table."""
        return self.vocab_size * self.hidden_size

    @property
    def embedding_parameters(self) -> int:
        """Embedding table and head: one matrix where they are tied, else two."""
        return self.head_parameters * (1 if self.is_tied else 2)

    @property
    def num_parameters(self) -> int:
        """Tied ones once; the last norm included."""
        return self.num_layers * self.layer_parameters + self.hidden_size + self.embedding_parameters

    @property
    def read_parameters(self) -> int:
        """What one decoding step reads: all but an untied embedding table, of which it looks up single rows."""
        return self.num_parameters - self.embedding_parameters + self.head_parameters


def target_shape(word: str, *, field: str = "target") -> ModelShape:
    """The shape that `word` names: one of `NAMES` or of `eval.shapes.SHAPES`, a Hugging Face id of these, or a folder.

    Raises:
        ValueError: no such name or folder, or an architecture whose parameters cannot be counted by these formulas.
    """
    if Path(word).is_dir():
        return shape_of_folder(Path(word), field=field)
    name = word.rsplit("/", 1)[-1].lower().removesuffix("-instruct")
    name = NAMES.get(name, name)
    if name not in SHAPES:
        raise ValueError(
            f"{field}={word!r}: no folder and no known shape; choose from {[*NAMES, *SHAPES]}, or give a folder that "
            f"holds the model's config.json (hf download {word} config.json --local-dir FOLDER)"
        )
    return _from_sizes(name, SHAPES[name])


def draft_shape(word: str, target: ModelShape) -> ModelShape:
    """As `target_shape`, with the target's vocabulary; `layers:N` is N of the target's own layers.

    Raises:
        ValueError: as `target_shape`; not 1 to the target's number of layers; a folder with another vocabulary.
    """
    if word.startswith(LAYERS):
        number = word.removeprefix(LAYERS)
        if not number.isdigit() or not 1 <= int(number) <= target.num_layers:
            raise ValueError(f"draft={word!r}: write {LAYERS}N with N from 1 to {target.num_layers}, the target's layers")
        return replace(target, name=f"{word} of {target.name}", num_layers=int(number))
    shape = target_shape(word, field="draft")
    if Path(word).is_dir() and shape.vocab_size != target.vocab_size:
        raise ValueError(
            f"draft={word!r}: its vocabulary of {shape.vocab_size} is not the target's of {target.vocab_size}; a draft needs "
            f"the target's own tokenizer: give another folder, a shape's name, or {LAYERS}N"
        )
    return replace(shape, vocab_size=target.vocab_size)


def shape_of_folder(folder: Path, *, field: str) -> ModelShape:
    """The shape that `folder/config.json` describes; nothing else there is read.

    Raises:
        ValueError: no readable config.json, or an architecture beyond `FAMILIES`.
    """
    try:
        model_type = json.loads((folder / "config.json").read_text()).get("model_type")
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(f"{field}={str(folder)!r}: no readable config.json in this folder ({error})") from error
    if model_type not in FAMILIES:
        raise ValueError(
            f"{field}={str(folder)!r}: model_type={model_type!r} has other parts than these formulas count; known are "
            f"{sorted(FAMILIES)}. Take the known shape that is nearest in size for a rough plan: {sorted(NAMES)}"
        )
    return shape_of_config(AutoConfig.from_pretrained(folder), name=folder.name or str(folder))


def shape_of_config(config: PreTrainedConfig, *, name: str) -> ModelShape:
    """The shape of a Transformers config whose `model_type` is among `FAMILIES`."""
    num_heads = int(config.num_attention_heads)
    sizes = Shape(
        str(config.model_type),
        int(config.vocab_size),
        int(config.hidden_size),
        int(config.intermediate_size),
        int(config.num_hidden_layers),
        num_heads,
        int(getattr(config, "num_key_value_heads", None) or num_heads),
        bool(config.tie_word_embeddings),
    )
    return _from_sizes(
        name,
        sizes,
        head_size=getattr(config, "head_dim", None),
        attention_bias=bool(getattr(config, "attention_bias", False)),
        mlp_bias=bool(getattr(config, "mlp_bias", False)),
    )


def _from_sizes(
    name: str, sizes: Shape, *, head_size: int | None = None, attention_bias: bool = False, mlp_bias: bool = False
) -> ModelShape:
    family = FAMILIES[sizes.model_type]

    def has(fixed: bool | None, of_config: bool) -> bool:
        return of_config if fixed is None else fixed

    return ModelShape(
        name, sizes.vocab_size, sizes.hidden_size, sizes.intermediate_size, sizes.num_layers, sizes.num_heads,
        sizes.num_kv_heads, head_size or sizes.hidden_size // sizes.num_heads, sizes.is_tied,
        has(family.has_qkv_bias, attention_bias), has(family.has_output_bias, attention_bias), has(family.has_mlp_bias, mlp_bias),
        family.num_layer_norms, family.has_qk_norm,
    )  # fmt: skip
