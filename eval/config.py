"""Settings of the acceptance measurement and the benchmark: the Hydra groups `eval` and `bench`."""

from dataclasses import dataclass, field
from typing import Any, Optional

from eval.shapes import shape_of
from specdec_runtime.config import MAX_TREE_NODES

SAMPLERS = ("probabilistic", "greedy")
PLAIN_BACKENDS = ("native", "hf_generate", "hf_generate_static", "vllm")
BACKENDS = (*PLAIN_BACKENDS, "hf_assisted")
DTYPES = ("bfloat16", "float16", "float32")


@dataclass
class WarperConfig:
    """top-k, top-p and min-p, as a request would ask for them."""

    top_k: Optional[int] = None
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        if (self.top_k is not None and self.top_k < 1) or not 0 < self.top_p <= 1 or not 0 <= self.min_p <= 1:
            raise ValueError(
                f"eval.warpers: top_k={self.top_k} must be >= 1 or null, top_p={self.top_p} in (0, 1], min_p={self.min_p} in [0, 1]"
            )


@dataclass
class EvalConfig:
    """Teacher-forced acceptance on held-out responses, or on the target's answers to a file of prompts.

    `warpers`: further figures at temperatures above 0. `max_gamma`: tau is worked out for gammas 1 to this one, and
    `num_decoded_prompts` are decoded with it, to see acceptance within a round. `num_viewer_prompts`: shown in the
    token viewer, with `viewer_gamma`. `num_prompts` and `max_new_tokens`: of `prompts` and the answers to them;
    `decoded_tokens`: of decoded and shown answers.
    """

    prompts: Optional[str] = None
    num_prompts: int = 80
    max_new_tokens: int = 128
    temperatures: list[float] = field(default_factory=lambda: [0.0, 1.0])
    samplers: list[str] = field(default_factory=lambda: ["probabilistic", "greedy"])
    warpers: list[WarperConfig] = field(default_factory=list)
    max_prompts: Optional[int] = None
    max_gamma: int = 8
    num_decoded_prompts: int = 8
    decoded_tokens: int = 64
    num_viewer_prompts: int = 3
    viewer_gamma: int = 4
    batch_tokens: int = 2048
    num_bootstrap: int = 1000
    seed: int = 0

    def __post_init__(self) -> None:
        if any(t < 0 for t in self.temperatures) or not self.temperatures:
            raise ValueError(
                f"eval.temperatures={list(self.temperatures)}: give one or more temperatures >= 0"
            )
        unknown = sorted(set(self.samplers) - set(SAMPLERS))
        if unknown or not self.samplers:
            raise ValueError(f"eval.samplers={list(self.samplers)}: choose from {list(SAMPLERS)}")
        positive = ("num_prompts", "max_new_tokens", "max_gamma", "decoded_tokens", "viewer_gamma", "batch_tokens", "num_bootstrap")
        for name in (*positive, *(("max_prompts",) if self.max_prompts is not None else ())):
            if getattr(self, name) < 1:
                raise ValueError(f"eval.{name}={getattr(self, name)}: must be >= 1")
        for name in ("num_decoded_prompts", "num_viewer_prompts"):
            if getattr(self, name) < 0:
                raise ValueError(f"eval.{name}={getattr(self, name)}: must be >= 0 (0 leaves it out)")


@dataclass
class BenchConfig:
    """Plain decoding against the drafts, in alternation, on the same prompts.

    `prompts`: a file of prompts, None for held-out prompts of the corpus. `dtype`: of both models, None for
    the target's. `auto_gamma`: also let the engine choose the proposal length, up to the largest of `gammas`.
    `ngram_gammas`: also proposals that are looked up in the text, of up to so many tokens; empty leaves that out.
    `trees`: also trees of proposals, by name or as lists of parents (`specdec_runtime.tree`). `medusa_heads`: a folder of Medusa
    heads, measured as the draft `medusa` in the chains of `gammas` and in `trees` that have no more depths than it has heads.
    `undistilled_gammas`: proposal lengths of drafts other than `distilled`, None for `gammas` and `trees`.
    `num_check_prompts`: prompts whose greedy outputs are compared with plain decoding at the same width.
    `max_minutes`: stop early, with whole groups.

    `target` ("random:<shape>") times random weights of a named shape instead of the run's models, on
    random prompts of `prompt_tokens`, with the shape `draft`, and with the share `acceptance` of
    proposals accepted by chance.
    """

    prompts: Optional[str] = None
    num_prompts: int = 24
    max_new_tokens: int = 96
    gammas: list[int] = field(default_factory=lambda: [1, 2, 3])
    auto_gamma: bool = False
    temperatures: list[float] = field(default_factory=lambda: [0.0, 1.0])
    batch_sizes: list[int] = field(default_factory=lambda: [1])
    backends: list[str] = field(default_factory=lambda: ["native", "hf_generate"])
    undistilled_gammas: Optional[list[int]] = None
    ngram_gammas: list[int] = field(default_factory=list)
    trees: list[Any] = field(default_factory=list)
    medusa_heads: Optional[str] = None
    dtype: Optional[str] = None
    num_warmup_prompts: int = 1
    num_check_prompts: int = 8
    max_minutes: Optional[float] = None
    ignore_eos: bool = False
    num_bootstrap: int = 1000
    seed: int = 0
    target: Optional[str] = None
    draft: str = "random:draft_0_5b"
    acceptance: Optional[float] = None
    prompt_tokens: int = 128

    def __post_init__(self) -> None:
        self._check_conditions()
        self._check_extent()
        self._check_random_shapes()

    def _check_conditions(self) -> None:
        unknown = sorted(set(self.backends) - set(BACKENDS))
        if unknown or not self.backends:
            raise ValueError(f"bench.backends={list(self.backends)}: choose from {list(BACKENDS)}")
        if not set(self.backends) & set(PLAIN_BACKENDS):
            raise ValueError(
                f"bench.backends={list(self.backends)}: a speedup needs plain decoding to compare with; "
                f"add one of {list(PLAIN_BACKENDS)}"
            )
        if not self.temperatures or min(self.temperatures) < 0:
            raise ValueError(
                f"bench.temperatures={list(self.temperatures)}: give one or more temperatures >= 0"
            )
        self._check_proposals()
        if not self.batch_sizes or min(self.batch_sizes) < 1:
            raise ValueError(f"bench.batch_sizes={list(self.batch_sizes)}: give one or more batch sizes >= 1")
        if self.dtype is not None and self.dtype not in DTYPES:
            raise ValueError(
                f"bench.dtype={self.dtype!r}: choose from {list(DTYPES)}, or null for target.dtype"
            )

    def _check_proposals(self) -> None:
        for name in ("gammas", "undistilled_gammas", "ngram_gammas"):
            gammas = getattr(self, name)
            if gammas is not None and min(gammas, default=1) < 1:
                raise ValueError(f"bench.{name}={list(gammas)}: proposal lengths must be >= 1")
        if not self.gammas and (self.auto_gamma or not (self.trees or self.ngram_gammas)):
            raise ValueError(
                "bench.gammas=[]: give one or more proposal lengths >= 1; only beside bench.trees or bench.ngram_gammas, and with "
                "bench.auto_gamma=false, there may be none"
            )
        if self.trees:
            self._check_trees()
        for name in ("trees", "medusa_heads"):
            if getattr(self, name) and "native" not in self.backends:
                raise ValueError(
                    f"bench.{name}={getattr(self, name)}: only the native engine does that; add native to bench.backends"
                )

    def _check_trees(self) -> None:
        # It brings in torch, which settings without a tree do not need.
        from specdec_runtime.tree import make_tree

        for topology in self.trees:
            try:
                make_tree(topology, max_nodes=MAX_TREE_NODES)
            except ValueError as error:
                raise ValueError(f"bench.trees={list(self.trees)}: {error}") from error

    def _check_extent(self) -> None:
        if self.max_minutes is not None and self.max_minutes <= 0:
            raise ValueError(f"bench.max_minutes={self.max_minutes}: must be > 0, or null for no limit")
        if self.num_warmup_prompts < 0 or self.num_check_prompts < 1:
            raise ValueError(
                f"bench.num_warmup_prompts={self.num_warmup_prompts} must be >= 0, "
                f"bench.num_check_prompts={self.num_check_prompts} must be >= 1"
            )
        for name in ("num_prompts", "max_new_tokens", "num_bootstrap"):
            if getattr(self, name) < 1:
                raise ValueError(f"bench.{name}={getattr(self, name)}: must be >= 1")

    def _check_random_shapes(self) -> None:
        if self.acceptance is not None and not 0 <= self.acceptance <= 1:
            raise ValueError(
                f"bench.acceptance={self.acceptance}: must lie in [0, 1], or null for the exact rule"
            )
        if self.prompt_tokens < 1:
            raise ValueError(f"bench.prompt_tokens={self.prompt_tokens}: must be >= 1")
        if self.target is None:
            if self.acceptance is not None:
                raise ValueError(
                    f"bench.acceptance={self.acceptance}: a synthetic acceptance is for random weights; "
                    "set bench.target=random:<shape> too"
                )
            return
        if self.prompts is not None:
            raise ValueError(
                f"bench.prompts={self.prompts!r}: random weights have no tokenizer; leave it null"
            )
        if self.medusa_heads is not None:
            raise ValueError(
                f"bench.medusa_heads={self.medusa_heads!r}: random weights have no trained heads; leave it null"
            )
        if "vllm" in self.backends:
            raise ValueError(
                f"bench.backends={list(self.backends)}: vllm loads model folders, and random weights have none"
            )
        for field_name, name in (("bench.target", self.target), ("bench.draft", self.draft)):
            shape_of(name, field=field_name)
