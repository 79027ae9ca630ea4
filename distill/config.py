"""Settings of the draft and of its training; they are also the Hydra groups `draft`, `loss` and `train`."""

from dataclasses import dataclass, field
from typing import Any, Optional, Union

LOSS_NAMES = ("forward_kl", "reverse_kl", "jsd", "tv", "nla", "lk_hybrid", "cross_entropy")
INITS = ("layers", "chosen", "width", "pretrained", "random", "medusa")
LAYER_PATTERNS = ("even", "first", "ends")
#: As `draft.vocab_shortlist`: the size is chosen by predicted speedup, once there is a corpus.
AUTO = "auto"
#: How a draft may be sampled when it is served; the first is what `train.eval_sampler=null` stands for.
EVAL_SAMPLERS = ("probabilistic", "greedy")
#: What keeps several processes in step. ddp: whole copies. fsdp: PyTorch's fully_shard (FSDP2). deepspeed: ZeRO stage 3.
ENGINES = ("ddp", "fsdp", "deepspeed")


@dataclass
class DraftConfig:
    """Where the draft comes from (`init`, of `INITS`); `path` always means a pretrained one.

    `keep_layers` wins over `num_layers` and `layer_pattern`. The sizes are for `width` and `random`, None being the target's.
    `vocab_shortlist` is a number of ids, `AUTO`, or None for the whole head; `expected_acceptance` is read with `AUTO` alone.
    `medusa` is no draft model: `num_heads` heads of `num_layers` residual blocks on the target; see `distill.medusa`.
    """

    init: str = "layers"
    path: Optional[str] = None
    num_layers: int = 4
    keep_layers: Optional[list[int]] = None
    layer_pattern: str = "even"
    candidates: Optional[list[list[int]]] = None
    candidate_steps: int = 200
    hidden_size: Optional[int] = None
    intermediate_size: Optional[int] = None
    num_key_value_heads: Optional[int] = None
    vocab_shortlist: Optional[Union[int, str]] = None
    expected_acceptance: float = 0.4
    train_head: Optional[bool] = None
    num_heads: Optional[int] = None

    def __post_init__(self) -> None:
        self._check_init()
        for name, value, choices in (("init", self.init, INITS), ("layer_pattern", self.layer_pattern, LAYER_PATTERNS)):
            if value not in choices:
                raise ValueError(f"draft.{name}={value!r}: choose from {list(choices)}")
        if self.candidate_steps < 1:
            raise ValueError(f"draft.candidate_steps={self.candidate_steps}: must be at least 1")
        if self.num_layers < 1:
            raise ValueError(f"draft.num_layers={self.num_layers}: a draft needs at least one layer")
        if self.keep_layers is not None and len(self.keep_layers) == 0:
            raise ValueError("draft.keep_layers=[]: name at least one layer, or leave it null for evenly spaced ones")
        is_word = isinstance(self.vocab_shortlist, str) and self.vocab_shortlist != AUTO
        if is_word or (self.shortlist_size is not None and self.shortlist_size < 1):
            raise ValueError(
                f"draft.vocab_shortlist={self.vocab_shortlist!r}: must be a positive number, null for the full head, or {AUTO}"
            )
        if not 0.0 < self.expected_acceptance <= 1.0:
            raise ValueError(f"draft.expected_acceptance={self.expected_acceptance}: must be above 0 and at most 1")

    def _check_init(self) -> None:
        """Settings of another kind of draft than the one that is asked for would silently do nothing."""
        if self.path is not None and self.init not in ("layers", "pretrained"):
            raise ValueError(f"draft.init={self.init} and draft.path={self.path!r} exclude each other: set one of them")
        if self.path is None and self.init == "pretrained":
            raise ValueError("draft.init=pretrained: set draft.path to a Hugging Face id or a folder")
        given = [name for name, size in self.sizes.items() if size is not None]
        if given and self.init not in ("width", "random"):
            raise ValueError(f"draft.{given[0]}: only draft.init=width and draft.init=random have sizes of their own")
        if self.init == "width" and not given:
            raise ValueError("draft.init=width: set draft.hidden_size, draft.intermediate_size or draft.num_key_value_heads")
        if self.candidates is not None and (self.init != "chosen" or not self.candidates):
            raise ValueError("draft.candidates: lists of layers for draft.init=chosen, at least one; null makes some")
        if (self.num_heads is None) == self.init_is_medusa or (self.num_heads is not None and self.num_heads < 1):
            raise ValueError(
                f"draft.num_heads={self.num_heads}: draft.init=medusa needs at least 1, and no other kind of draft has any"
            )
        if self.init_is_medusa and self.train_head is not None:
            raise ValueError(f"draft.train_head={self.train_head}: Medusa heads are always trained; set it to null")
        if self.init_is_medusa and self.vocab_shortlist == AUTO:
            raise ValueError(f"draft.vocab_shortlist={AUTO}: is for draft models; with draft.init=medusa give a number, or null")
        if self.keep_layers is not None and self.init in ("chosen", "random", "medusa"):
            raise ValueError(f"draft.keep_layers={list(self.keep_layers)}: draft.init={self.init} does not read it; set it to null")

    @property
    def init_is_medusa(self) -> bool:
        """Whether heads on the target are trained in place of a draft model."""
        return self.init == "medusa"

    @property
    def sizes(self) -> dict[str, Any]:
        """The widths, by their names in a model's config."""
        names = ("hidden_size", "intermediate_size", "num_key_value_heads")
        return {name: getattr(self, name) for name in names}

    @property
    def shortlist_size(self) -> Optional[int]:
        """The number of ids that is set; None for the whole head, and for `AUTO`, where it is not chosen yet."""
        return self.vocab_shortlist if isinstance(self.vocab_shortlist, int) else None

    @property
    def has_own_head(self) -> bool:
        """Whether the draft's head is untied and trained: as `train_head` says, else where a shortlist makes it cheap."""
        return self.vocab_shortlist is not None if self.train_head is None else self.train_head


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
        if self.lk_eta < 0:
            raise ValueError(f"loss.lk_eta={self.lk_eta}: must be >= 0 (0 is forward KL alone)")

    @property
    def needs_cached_probabilities(self) -> bool:
        """Whether the corpus must hold the target's probabilities: cross entropy alone needs its tokens only."""
        return self.teacher == "cached" and any(weight > 0 for name, weight in self.weights.items() if name != "cross_entropy")


@dataclass
class TokenSelectionConfig:
    """Train only where a reference copy of the draft shows that learning is possible; see `distill.token_selection`."""

    keep_fraction: float = 1.0
    reference_steps: Optional[int] = None
    reference_minutes: Optional[float] = None

    def __post_init__(self) -> None:
        if not 0.0 < self.keep_fraction <= 1.0:
            raise ValueError(
                f"train.token_selection.keep_fraction={self.keep_fraction}: must be above 0 and at most 1 (every position)"
            )
        for name in ("reference_steps", "reference_minutes"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"train.token_selection.{name}={value}: must be > 0, or null for no such budget")
        if self.enabled and self.reference_steps is None and self.reference_minutes is None:
            raise ValueError(
                f"train.token_selection.keep_fraction={self.keep_fraction} needs a reference: set reference_steps or "
                "reference_minutes, the budget that it is trained for"
            )

    @property
    def enabled(self) -> bool:
        """Whether any position is left out."""
        return self.keep_fraction < 1.0


@dataclass
class OnPolicyConfig:
    """A phase after the offline one, on text that the draft continues itself; see `distill.on_policy`. Off without a budget."""

    max_steps: Optional[int] = None
    max_minutes: Optional[float] = None
    lmbda_start: float = 0.5
    lmbda_end: float = 1.0
    rows_per_step: int = 8
    max_new_tokens: int = 32
    temperature: float = 1.0
    continue_answers: bool = True
    learning_rate: float = 5.0e-4
    eval_every_steps: int = 50

    def __post_init__(self) -> None:
        for name in ("max_steps", "max_minutes"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"train.on_policy.{name}={value}: must be > 0, or null for no such budget")
        for name in ("lmbda_start", "lmbda_end"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(
                    f"train.on_policy.{name}={getattr(self, name)}: must be within 0 (the target's text) and 1 (the draft's)"
                )
        for name in ("rows_per_step", "max_new_tokens", "eval_every_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"train.on_policy.{name}={getattr(self, name)}: must be at least 1")
        for name in ("temperature", "learning_rate"):
            if getattr(self, name) <= 0:
                raise ValueError(f"train.on_policy.{name}={getattr(self, name)}: must be > 0")

    @property
    def enabled(self) -> bool:
        """Whether there is such a phase."""
        return self.max_steps is not None or self.max_minutes is not None


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
    head_chunk_tokens: int = 64
    train_embeddings: bool = False
    autocast_dtype: str = "bfloat16"
    eval_every_steps: int = 100
    eval_sampler: Optional[str] = None
    checkpoint_every_steps: int = 100
    seed: int = 0
    liger: bool = False
    token_selection: TokenSelectionConfig = field(default_factory=TokenSelectionConfig)
    on_policy: OnPolicyConfig = field(default_factory=OnPolicyConfig)

    def __post_init__(self) -> None:
        for name in ("tokens_per_step", "gradient_accumulation_steps", "max_sequence_tokens", "head_chunk_tokens",
                     "eval_every_steps", "checkpoint_every_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"train.{name}={getattr(self, name)}: must be at least 1")
        for name in ("learning_rate", "num_epochs", "max_grad_norm"):
            if getattr(self, name) <= 0:
                raise ValueError(f"train.{name}={getattr(self, name)}: must be > 0")
        for name in ("warmup_fraction", "min_lr_fraction"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"train.{name}={getattr(self, name)}: must be within 0 and 1")
        if self.weight_decay < 0 or not 0.0 <= self.adam_beta2 < 1.0:
            raise ValueError(
                f"train.weight_decay={self.weight_decay} must be >= 0 and train.adam_beta2={self.adam_beta2} at least 0 and below 1"
            )
        if self.max_minutes is not None and self.max_minutes <= 0:
            raise ValueError(f"train.max_minutes={self.max_minutes}: must be > 0, or null for no time budget")
        if self.max_steps is not None and self.max_steps < 1:
            raise ValueError(f"train.max_steps={self.max_steps}: must be at least 1, or null for no step budget")
        if self.eval_sampler not in (None, *EVAL_SAMPLERS):
            raise ValueError(f"train.eval_sampler={self.eval_sampler!r}: choose from {list(EVAL_SAMPLERS)}; null is {EVAL_SAMPLERS[0]}")
        if self.autocast_dtype not in ("bfloat16", "float32"):
            raise ValueError(f"train.autocast_dtype={self.autocast_dtype!r}: choose 'bfloat16' or 'float32'")


def refuse_for_medusa(train: TrainConfig) -> None:
    """Raises ValueError for a setting that only draft models have."""
    for name, is_set in (
        ("train_embeddings", train.train_embeddings),
        ("eval_sampler", train.eval_sampler is not None),
        ("liger", train.liger),
        ("token_selection.keep_fraction", train.token_selection.enabled),
        ("on_policy", train.on_policy.enabled),
    ):
        if is_set:
            raise ValueError(f"train.{name}: not for draft.init=medusa; leave it at its default")
