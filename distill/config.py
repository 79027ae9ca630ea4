"""Settings of the draft and of its training; they are also the Hydra groups `draft`, `loss` and `train`."""

from dataclasses import dataclass, field
from typing import Optional

LOSS_NAMES = ("forward_kl", "reverse_kl", "jsd", "tv", "nla", "lk_hybrid", "cross_entropy")


@dataclass
class DraftConfig:
    """Where the draft comes from. `path` wins over the layer-copy settings."""

    path: Optional[str] = None
    num_layers: int = 4
    keep_layers: Optional[list[int]] = None
    vocab_shortlist: Optional[int] = None

    def __post_init__(self) -> None:
        if self.num_layers < 1:
            raise ValueError(f"draft.num_layers={self.num_layers}: a draft needs at least one layer")
        if self.keep_layers is not None and len(self.keep_layers) == 0:
            raise ValueError("draft.keep_layers=[]: name at least one layer, or leave it null for evenly spaced ones")
        if self.vocab_shortlist is not None and self.vocab_shortlist < 1:
            raise ValueError(f"draft.vocab_shortlist={self.vocab_shortlist}: must be positive, or null for the full head")


@dataclass
class LossConfig:
    """A weighted sum of losses, e.g. weights={forward_kl: 1.0} or {tv: 0.9, cross_entropy: 0.1}."""

    weights: dict[str, float] = field(default_factory=lambda: {"forward_kl": 1.0})
    teacher: str = "cached"
    temperature: float = 1.0
    jsd_beta: float = 0.5
    lk_eta: float = 3.0

    def __post_init__(self) -> None:
        unknown = sorted(set(self.weights) - set(LOSS_NAMES))
        if unknown:
            raise ValueError(f"loss.weights names {unknown}, which are not losses; choose from {list(LOSS_NAMES)}")
        if not self.weights or min(self.weights.values()) < 0 or max(self.weights.values()) <= 0:
            raise ValueError(f"loss.weights={dict(self.weights)}: weights must be >= 0 and one of them > 0")
        if self.teacher not in ("cached", "online"):
            raise ValueError(f"loss.teacher={self.teacher!r}: choose 'cached' (stored top-k) or 'online' (live target)")
        if self.temperature <= 0:
            raise ValueError(f"loss.temperature={self.temperature}: must be > 0")
        if not 0.0 <= self.jsd_beta <= 1.0:
            raise ValueError(f"loss.jsd_beta={self.jsd_beta}: must be within 0 (forward KL) and 1 (reverse KL)")


@dataclass
class TrainConfig:
    """Budget and optimiser. Training ends at the first of `max_minutes`, `max_steps` and `num_epochs` that is reached."""

    max_minutes: Optional[float] = None
    max_steps: Optional[int] = None
    num_epochs: float = 3.0
    learning_rate: float = 2.0e-3
    warmup_fraction: float = 0.03
    min_lr_fraction: float = 0.05
    weight_decay: float = 0.0
    adam_beta2: float = 0.95
    max_grad_norm: float = 1.0
    tokens_per_step: int = 512
    gradient_accumulation_steps: int = 1
    max_sequence_tokens: int = 512
    head_chunk_tokens: int = 512
    train_embeddings: bool = False
    autocast_dtype: str = "bfloat16"
    eval_every_steps: int = 100
    checkpoint_every_steps: int = 100
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("tokens_per_step", "gradient_accumulation_steps", "max_sequence_tokens", "head_chunk_tokens",
                     "eval_every_steps", "checkpoint_every_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"train.{name}={getattr(self, name)}: must be at least 1")
        for name in ("learning_rate", "num_epochs", "max_grad_norm"):
            if getattr(self, name) <= 0:
                raise ValueError(f"train.{name}={getattr(self, name)}: must be > 0")
        for name in ("warmup_fraction", "min_lr_fraction", "adam_beta2"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"train.{name}={getattr(self, name)}: must be within 0 and 1")
        if self.max_minutes is not None and self.max_minutes <= 0:
            raise ValueError(f"train.max_minutes={self.max_minutes}: must be > 0, or null for no time budget")
        if self.max_steps is not None and self.max_steps < 1:
            raise ValueError(f"train.max_steps={self.max_steps}: must be at least 1, or null for no step budget")
        if self.autocast_dtype not in ("bfloat16", "float32"):
            raise ValueError(f"train.autocast_dtype={self.autocast_dtype!r}: choose 'bfloat16' or 'float32'")
