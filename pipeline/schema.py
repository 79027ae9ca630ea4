"""The whole configuration as dataclasses: Hydra refuses an unknown key or a wrong type by its name."""

from dataclasses import dataclass, field
from typing import Optional

from distill.config import ENGINES, DraftConfig, LossConfig, TrainConfig
from eval.config import BenchConfig, EvalConfig
from pipeline.corpus_schema import CorpusConfig
from specdec_runtime.config import DecoderConfig

STAGE_NAMES = ("preflight", "corpus", "distill", "eval", "bench", "export")


@dataclass
class RandomModelConfig:
    """A seeded random Llama with a tokenizer made on the spot: the target of the tests."""

    seed: int = 0
    vocab_size: int = 320
    hidden_size: int = 32
    intermediate_size: int = 64
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    initializer_range: float = 0.2
    max_position_embeddings: int = 512


@dataclass
class TargetConfig:
    """`path` is a Hugging Face id or a local folder; without it the embedded target is used, or `random`."""

    name: str = "smollm2-135m-instruct"
    path: Optional[str] = None
    revision: Optional[str] = None
    random: Optional[RandomModelConfig] = None
    dtype: str = "bfloat16"
    chat: bool = True
    trust_remote_code: bool = False


@dataclass
class LaunchConfig:
    """How the distill stage's training is spread over the processes of this machine; null: it is one process.

    No part of a fingerprint: the draft does not depend on it.
    """

    engine: Optional[str] = None
    num_processes: Optional[int] = None

    def __post_init__(self) -> None:
        if self.engine is not None and self.engine not in ENGINES:
            raise ValueError(f"launch.engine={self.engine!r}: choose from {list(ENGINES)}, or null for one process")
        if self.engine is None and self.num_processes is not None:
            raise ValueError(f"launch.num_processes={self.num_processes}: say how they work together, launch.engine=ddp for one")
        if self.num_processes is not None and self.num_processes < 1:
            raise ValueError(f"launch.num_processes={self.num_processes}: must be at least 1, or null for one on each GPU")


@dataclass
class TrackingConfig:
    enabled: bool = True
    uri: str = "sqlite:///mlflow.db"
    experiment: str = "draftsmith"
    registered_model: Optional[str] = None
    timeout_s: float = 5.0
    run_name: Optional[str] = None
    parent_run: Optional[str] = None

    def __post_init__(self) -> None:
        if self.timeout_s <= 0:
            raise ValueError(f"tracking.timeout_s={self.timeout_s}: must be above 0")


@dataclass
class PreflightConfig:
    max_gamma: int = 4
    context_tokens: int = 128
    num_repeats: int = 15
    min_free_disk_gib: float = 2.0

    def __post_init__(self) -> None:
        for name, least in (("max_gamma", 1), ("context_tokens", 2), ("num_repeats", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"preflight.{name}={getattr(self, name)}: must be at least {least}")


@dataclass
class ExportConfig:
    dtype: str = "bfloat16"
    push: bool = False


@dataclass
class GateConfig:
    """The run exits non-zero when a value that is set here is not reached."""

    min_speedup: Optional[float] = None
    min_acceptance: Optional[float] = None
    require_lossless: bool = True


@dataclass
class Config:
    stages: list[str] = field(default_factory=lambda: list(STAGE_NAMES))
    seed: int = 0
    artifacts_dir: str = "artifacts"
    artifacts_store: Optional[str] = None
    target: TargetConfig = field(default_factory=TargetConfig)
    draft: DraftConfig = field(default_factory=DraftConfig)
    corpus: CorpusConfig = field(default_factory=CorpusConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    bench: BenchConfig = field(default_factory=BenchConfig)
    runtime: DecoderConfig = field(default_factory=DecoderConfig)
    preflight: PreflightConfig = field(default_factory=PreflightConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    gate: GateConfig = field(default_factory=GateConfig)
