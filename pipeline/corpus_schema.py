"""The group `corpus` of the configuration as dataclasses, and what its settings must satisfy together."""

from dataclasses import asdict, dataclass, field
from typing import Any, Optional

CORPUS_BACKENDS = ("native", "vllm", "openai", "ray")
RAY_ENGINES = ("vllm", "native")
#: By backend, what `corpus.engine_args` must not say, and the setting that says it: rows would not be what they are written down as.
_VLLM_FIELDS = {"model": "target.path"}
SAID_ELSEWHERE = {
    "openai": {
        "model": "corpus.served_model", "prompt": "corpus.prompts", "max_tokens": "corpus.max_new_tokens", "seed": "corpus.seed",
        "temperature": "corpus.shares", "top_p": "corpus.shares", "n": "corpus.samples_per_prompt", "logprobs": "corpus.topk",
    },
    "vllm": _VLLM_FIELDS,
    "ray": _VLLM_FIELDS,
}  # fmt: skip


@dataclass
class ShareConfig:
    """A part of the answers, `share` of all, that is sampled alike."""

    share: float = 1.0
    temperature: float = 0.0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1 or self.temperature < 0 or not 0 < self.top_p <= 1:
            raise ValueError(f"corpus.shares={asdict(self)}: share and top_p must lie in (0, 1], temperature be >= 0")


@dataclass
class SourceConfig:
    """One source of a mixture; its weight counts against the others'. `prompts` null: the target asks itself."""

    prompts: Optional[str] = None
    weight: float = 1.0
    domain: str = ""
    column: Optional[str] = None
    split: str = "train"
    subset: Optional[str] = None
    domain_column: Optional[str] = None

    def __post_init__(self) -> None:
        if not 0 < self.weight < float("inf"):
            raise ValueError(f"corpus.mixture: weight={self.weight} of {self.prompts!r} must be above 0")


def _half_greedy() -> list[ShareConfig]:
    return [ShareConfig(0.5, 0.0), ShareConfig(0.5, 1.0)]


@dataclass
class CorpusConfig:
    """Who asks, how the target answers, and how the answers are stored.

    `prompts` is a file or a Hugging Face dataset; without it the target invents `num_prompts` questions. There,
    `num_prompts` is the most rows that are taken (null: all). `topics` fill `{topic}` in the system prompts.
    """

    prompts: Optional[str] = None
    prompts_column: Optional[str] = None
    prompts_split: str = "train"
    prompts_subset: Optional[str] = None
    domain_column: Optional[str] = None
    mixture: list[SourceConfig] = field(default_factory=list)
    turn_by_turn: bool = False
    prefix_tokens: Optional[int] = None
    num_prompts: Optional[int] = 1000
    system_prompts: list[str] = field(default_factory=list)
    question_starters: list[str] = field(default_factory=list)
    topics: list[str] = field(default_factory=list)
    self_ask_temperature: float = 1.0
    self_ask_top_p: float = 0.95
    max_question_tokens: int = 48
    min_question_tokens: int = 4
    max_questions_per_prompt: float = 4.0
    near_duplicate_jaccard: float = 0.7
    shares: list[ShareConfig] = field(default_factory=_half_greedy)
    samples_per_prompt: int = 1
    max_prompt_tokens: int = 256
    max_new_tokens: int = 128
    backend: str = "native"
    engine_args: dict[str, Any] = field(default_factory=dict)
    base_urls: list[str] = field(default_factory=list)
    served_model: Optional[str] = None
    num_in_flight: int = 64
    request_timeout_s: float = 600.0
    max_retries: int = 8
    ray_engine: Optional[str] = None
    ray_address: Optional[str] = None
    ray_num_actors: int = 1
    ray_cpus_per_actor: int = 1
    ray_gpus_per_actor: Optional[float] = None
    rescore: bool = False
    batch_size: int = 64
    shard_rows: int = 64
    topk: int = 64
    held_out_fraction: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("max_question_tokens", "min_question_tokens", "max_prompt_tokens", "max_new_tokens", "batch_size", "shard_rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"corpus.{name}={getattr(self, name)}: must be at least 1")
        if self.min_question_tokens > self.max_question_tokens:
            raise ValueError(
                f"corpus.min_question_tokens={self.min_question_tokens}: must be at most max_question_tokens={self.max_question_tokens}"
            )
        if self.num_prompts is None and self.prompts is None and (not self.mixture or any(s.prompts is None for s in self.mixture)):
            raise ValueError("corpus.num_prompts=null: say how many questions the target shall invent, or set corpus.prompts")
        if self.num_prompts is not None and self.num_prompts < 1:
            raise ValueError(f"corpus.num_prompts={self.num_prompts}: must be at least 1")
        if self.topk < 0:
            raise ValueError(f"corpus.topk={self.topk}: must be 0 (nothing stored) or more")
        self._check_sources()
        self._check_shares()
        self._check_engine()
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

    def _check_engine(self) -> None:
        if self.backend not in CORPUS_BACKENDS:
            raise ValueError(f"corpus.backend={self.backend!r}: choose from {list(CORPUS_BACKENDS)}")
        if (self.backend == "openai") != bool(self.base_urls):
            raise ValueError(
                f"corpus.base_urls={list(self.base_urls)}: corpus.backend=openai needs one or more, as in "
                "corpus.base_urls=[http://localhost:8000/v1]; the other backends take none"
            )
        if (self.backend == "native" or (self.backend == "ray" and self.ray_engine == "native")) and self.engine_args:
            raise ValueError(f"corpus.engine_args={dict(self.engine_args)}: only the engines vllm and openai take them")
        for name, setting in SAID_ELSEWHERE.get(self.backend, {}).items():
            if name in self.engine_args:
                raise ValueError(
                    f"corpus.engine_args={dict(self.engine_args)}: {name} is not taken from there; set {setting}, which rows go by"
                )
        self._check_ray()
        if self.num_in_flight < 1 or self.max_retries < 0 or self.request_timeout_s <= 0:
            raise ValueError(
                f"corpus.num_in_flight={self.num_in_flight} must be at least 1, corpus.max_retries={self.max_retries} 0 or more, "
                f"corpus.request_timeout_s={self.request_timeout_s} above 0"
            )
        if self.rescore and self.topk == 0:
            raise ValueError("corpus.rescore=true with corpus.topk=0: there is nothing to compute; raise corpus.topk")

    def _check_ray(self) -> None:
        if self.ray_engine not in (None, *RAY_ENGINES):
            raise ValueError(f"corpus.ray_engine={self.ray_engine!r}: choose from {list(RAY_ENGINES)}; null is vllm")
        if self.backend != "ray" and (self.ray_engine is not None or self.ray_address is not None):
            raise ValueError(
                f"corpus.ray_engine={self.ray_engine} and corpus.ray_address={self.ray_address}: only corpus.backend=ray takes them"
            )
        if self.ray_num_actors < 1 or self.ray_cpus_per_actor < 1:
            raise ValueError(
                f"corpus.ray_num_actors={self.ray_num_actors} and corpus.ray_cpus_per_actor={self.ray_cpus_per_actor} must be at least 1"
            )
        if self.ray_gpus_per_actor is not None and self.ray_gpus_per_actor < 0:
            raise ValueError(f"corpus.ray_gpus_per_actor={self.ray_gpus_per_actor}: must be 0 or more, or null")

    def _check_sources(self) -> None:
        if self.mixture and self.prompts == "":
            self.prompts = None  # the option that asks for prompts has got them
        if self.prompts is not None and self.mixture:
            raise ValueError("corpus.prompts and corpus.mixture exclude each other: make corpus.prompts one of the mixture's entries")
        for name in ("prompts_column", "prompts_subset", "domain_column"):
            if self.prompts is None and getattr(self, name) is not None:
                raise ValueError(
                    f"corpus.{name}={getattr(self, name)!r} is about corpus.prompts, which is not set (entries of a mixture have their own)"
                )
        if sum(source.prompts is None for source in self.mixture) > 1:
            raise ValueError("corpus.mixture: only one entry may have prompts=null, the questions that the target invents")
        if self.prefix_tokens is not None and self.prefix_tokens < 1:
            raise ValueError(f"corpus.prefix_tokens={self.prefix_tokens}: must be at least 1, or null for whole texts")
        if not 0 < self.near_duplicate_jaccard <= 1:
            raise ValueError(f"corpus.near_duplicate_jaccard={self.near_duplicate_jaccard}: must lie in (0, 1]; 1 drops equal texts only")

    def _check_shares(self) -> None:
        if self.samples_per_prompt < 1:
            raise ValueError(f"corpus.samples_per_prompt={self.samples_per_prompt}: must be at least 1")
        total = sum(share.share for share in self.shares)
        if abs(total - 1) > 1e-6:
            raise ValueError(f"corpus.shares: the shares add up to {total:g}; they must add up to 1")
        greedy = sum(share.share for share in self.shares if share.temperature == 0)
        if self.samples_per_prompt * greedy > 1 + 1e-6:
            raise ValueError(
                f"corpus.samples_per_prompt={self.samples_per_prompt} with a share of {greedy:g} at temperature 0 would give some "
                f"answers twice: at most one sample of a prompt can be greedy, so lower the share to {1 / self.samples_per_prompt:g}"
            )
