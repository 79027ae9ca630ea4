"""Shapes of well-known models by name, for timing with random weights where the real ones are not at hand."""

from dataclasses import dataclass

PREFIX = "random:"


@dataclass(frozen=True)
class Shape:
    """Sizes that decide what a decoder-only transformer with gated MLPs costs.

    `model_type`: Transformers' name of the architecture. `is_tied`: the head shares the embedding's weights.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    is_tied: bool


#: From the models' published config.json; `draft_*` and `tiny*` are this project's own. A draft is built with
#: its target's vocabulary, whatever its own is.
SHAPES = {
    "llama3_70b": Shape("llama", 128256, 8192, 28672, 80, 64, 8, False),
    "llama3_8b": Shape("llama", 128256, 4096, 14336, 32, 32, 8, False),
    "llama3_2_1b": Shape("llama", 128256, 2048, 8192, 16, 32, 8, True),
    "qwen2_5_7b": Shape("qwen2", 152064, 3584, 18944, 28, 28, 4, False),
    "smollm2_135m": Shape("llama", 49152, 576, 1536, 30, 9, 3, True),
    "draft_0_5b": Shape("llama", 128256, 896, 4864, 24, 14, 2, True),
    "draft_wide": Shape("llama", 128256, 2048, 5632, 4, 16, 4, True),
    "draft_30m": Shape("llama", 49152, 576, 1536, 2, 9, 3, True),
    "tiny": Shape("llama", 320, 64, 128, 4, 4, 2, True),
    "tiny_draft": Shape("llama", 320, 32, 64, 1, 4, 2, True),
}


def shape_of(name: str, *, field: str) -> Shape:
    """The shape that `random:<shape>` names.

    Raises:
        ValueError: no such shape; `field` is the setting that the name came from.
    """
    shape = SHAPES.get(name.removeprefix(PREFIX)) if name.startswith(PREFIX) else None
    if shape is None:
        raise ValueError(f"{field}={name!r}: write {PREFIX}<shape> with a shape of {list(SHAPES)}")
    return shape
