"""What can be asked of a plan, as words: `target=llama-3.1-8b tokens=100M gpu=h100`."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Optional

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pipeline.errors import describe

_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9}


@dataclass
class PlanSettings:
    """`tokens` are the corpus's response tokens, such as 100M. None: worked out, or the datasheet's.

    Lengths are tokens of a mean prompt and response. `step_tokens` are the supervised tokens of an optimiser step, all GPUs
    together; `max_micro_batch_tokens` the most of them in one forward. The three utilisations are shares of the GPU's peak
    that are assumed to be reached: bandwidth in decoding, FLOPs in reading prompts, FLOPs in training.
    """

    target: str = "llama-3.1-8b"
    draft: str = "draft-0.5b"
    tokens: str = "100M"
    gpu: str = "h100"
    num_gpus: Optional[int] = None
    memory_gb: Optional[float] = None
    bandwidth_gb_s: Optional[float] = None
    bf16_tflops: Optional[float] = None
    link_gb_s: Optional[float] = None
    prompt_tokens: int = 256
    response_tokens: int = 512
    topk: int = 64
    max_batch_size: int = 256
    epochs: float = 3.0
    step_tokens: int = 65536
    max_micro_batch_tokens: int = 16384
    head_chunk_tokens: int = 4096
    train_embeddings: bool = False
    keep_target: bool = True
    decode_utilisation: float = 0.6
    prefill_utilisation: float = 0.5
    train_utilisation: float = 0.35
    json: Optional[str] = None

    def __post_init__(self) -> None:
        positive = ("prompt_tokens", "response_tokens", "max_batch_size", "epochs", "step_tokens", "max_micro_batch_tokens",
                    "head_chunk_tokens")  # fmt: skip
        for name in positive:
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)}: must be a number above 0")
        if self.topk < 0:
            raise ValueError(f"topk={self.topk}: must be 0 (nothing stored) or more")
        if self.num_gpus is not None and self.num_gpus < 1:
            raise ValueError(f"num_gpus={self.num_gpus}: must be at least 1, or left out for as few as will do")
        for name in ("decode_utilisation", "prefill_utilisation", "train_utilisation"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)}: must lie in (0, 1], a share of the GPU's peak")
        if self.num_tokens < 1:
            raise ValueError(f"tokens={self.tokens!r}: must be at least 1")

    @property
    def num_tokens(self) -> int:
        """Response tokens of the corpus."""
        found = re.fullmatch(r"([0-9.]+(?:e[0-9]+)?)([kmbg]?)", self.tokens.strip().lower().replace("_", ""))
        try:
            if found is None:
                raise ValueError(self.tokens)
            return round(float(found[1]) * _UNITS[found[2]])
        except (ValueError, OverflowError) as error:
            raise ValueError(f"tokens={self.tokens!r}: write a number such as 100000000, 1e8, 100M or 1B") from error

    @property
    def num_rows(self) -> float:
        """Rows of the corpus at the mean response length."""
        return self.num_tokens / self.response_tokens

    @property
    def row_tokens(self) -> int:
        """Prompt and response of a mean row."""
        return self.prompt_tokens + self.response_tokens


def read_settings(words: Sequence[str]) -> PlanSettings:
    """The settings that words such as `tokens=1B` give.

    Raises:
        ValueError: a word without `=`, an unknown field, a wrong type or a value that cannot be.
    """
    fields = ", ".join(PlanSettings.__dataclass_fields__)
    bare = [word for word in words if "=" not in word]
    if bare:
        raise ValueError(f"{bare}: only settings such as tokens=100M can be given; they are {fields}")
    pairs = [word.split("=", 1) for word in words]
    empty = [name for name, value in pairs if not value]
    if empty:
        raise ValueError(f"{empty[0]}=: give a value, or leave the word out")
    try:
        # Values stay texts here, so that a name such as 0.5b or a path is not read as YAML; the schema converts them.
        merged = OmegaConf.merge(OmegaConf.structured(PlanSettings), dict(pairs))
        settings = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise ValueError(f"{describe(error)}\nsettings are {fields}") from error
    assert isinstance(settings, PlanSettings)
    return settings
