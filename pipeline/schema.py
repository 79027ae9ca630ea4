"""The whole configuration as dataclasses: Hydra refuses an unknown key or a wrong type by its name."""

from dataclasses import dataclass, field
from typing import Optional

from distill.config import DraftConfig, LossConfig, TrainConfig
from eval.config import BenchConfig, EvalConfig
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
class CorpusConfig:
    """Who asks, how the target answers, and how the answers are stored.

    `prompts` is a file or a Hugging Face dataset; without it the target invents `num_prompts` questions. There,
    `num_prompts` is the most rows that are taken (null: all). `topics` fill `{topic}` in the system prompts.
    """

    prompts: Optional[str] = None
    prompts_column: Optional[str] = None
    prompts_split: str = "train"
    num_prompts: Optional[int] = 1000
    system_prompts: list[str] = field(default_factory=list)
    question_starters: list[str] = field(default_factory=list)
    topics: list[str] = field(default_factory=list)
    self_ask_temperature: float = 1.0
    self_ask_top_p: float = 0.95
    max_question_tokens: int = 48
    min_question_tokens: int = 4
    max_questions_per_prompt: float = 4.0
    temperatures: list[float] = field(default_factory=lambda: [0.0, 1.0])
    max_prompt_tokens: int = 256
    max_new_tokens: int = 128
    batch_size: int = 64
    shard_rows: int = 64
    topk: int = 64
    held_out_fraction: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("max_question_tokens", "min_question_tokens", "max_prompt_tokens", "max_new_tokens", "batch_size", "shard_rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"corpus.{name}={getattr(self, name)}: must be at least 1")
        if self.num_prompts is None and self.prompts is None:
            raise ValueError("corpus.num_prompts=null: say how many questions the target shall invent, or set corpus.prompts")
        if self.num_prompts is not None and self.num_prompts < 1:
            raise ValueError(f"corpus.num_prompts={self.num_prompts}: must be at least 1")
        if self.topk < 0:
            raise ValueError(f"corpus.topk={self.topk}: must be 0 (nothing stored) or more")
        if not self.temperatures or min(self.temperatures) < 0:
            raise ValueError(f"corpus.temperatures={list(self.temperatures)}: give one or more, each >= 0")
        if self.self_ask_temperature < 0 or not 0 < self.self_ask_top_p <= 1:
            raise ValueError(
                f"corpus.self_ask_temperature={self.self_ask_temperature} must be >= 0 and "
                f"corpus.self_ask_top_p={self.self_ask_top_p} in (0, 1]"
            )
        if self.max_questions_per_prompt < 1:
            raise ValueError(f"corpus.max_questions_per_prompt={self.max_questions_per_prompt}: must be at least 1")
        if not 0 < self.held_out_fraction < 1:
            raise ValueError(f"corpus.held_out_fraction={self.held_out_fraction}: must lie between 0 and 1")
        if any("{topic}" in prompt for prompt in self.system_prompts) != bool(self.topics):
            raise ValueError("corpus.topics and a corpus.system_prompts entry with {topic} go together: set both or neither")


@dataclass
class TrackingConfig:
    enabled: bool = True
    uri: str = "sqlite:///mlflow.db"
    experiment: str = "draftsmith"
    registered_model: Optional[str] = None
    timeout_s: float = 5.0


@dataclass
class PreflightConfig:
    max_gamma: int = 4
    context_tokens: int = 128
    num_repeats: int = 15
    min_free_disk_gib: float = 2.0


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
    target: TargetConfig = field(default_factory=TargetConfig)
    draft: DraftConfig = field(default_factory=DraftConfig)
    corpus: CorpusConfig = field(default_factory=CorpusConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    bench: BenchConfig = field(default_factory=BenchConfig)
    runtime: DecoderConfig = field(default_factory=DecoderConfig)
    preflight: PreflightConfig = field(default_factory=PreflightConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    gate: GateConfig = field(default_factory=GateConfig)
