"""Settings of the decoding engine; they are also the Hydra group `runtime`."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Optional

if TYPE_CHECKING:
    from specdec_runtime.tree import DynamicTree, Tree

DRAFTERS = ("model", "ngram", "medusa")
SAMPLERS = ("probabilistic", "greedy")
GAMMAS = ("fixed", "auto")
ACCEPTANCES = ("exact", "typical", "lenient", "synthetic")
INVARIANT_WIDTH = 8  # of every decode forward under width_invariant, so that all gammas below it share a shape
MAX_TREE_NODES = 63  # with the root, what the scratch positions of a slot hold


@dataclass
class DecoderConfig:
    """How the engine proposes, verifies and bounds its work. Field by field, in `conf/runtime/native.yaml`.

    A valid OmegaConf schema, which has no union of a name and a list: hence `tree` of any type. A wrong value raises
    `ValueError` with the field's name.
    """

    # What is proposed
    drafter: str = "model"
    num_speculative_tokens: int = 4
    gamma: str = "fixed"
    sampler: str = "probabilistic"
    draft_confidence: float = 0.0
    tree: Any = None
    ngram_max: int = 3
    ngram_min: int = 1
    # What is accepted
    acceptance: str = "exact"
    eta: float = 0.3
    lenience: float = 0.7
    synthetic_acceptance: float = 0.7
    # Batch and memory
    max_batch_size: int = 8
    max_length: Optional[int] = None
    prefill_chunk_tokens: int = 512
    kv_memory_limit_gib: Optional[float] = None
    # Guards
    max_draft_tokens: int = 128
    max_gamma_spread: int = 2
    max_prompt_tokens_to_speculate: Optional[int] = 4096
    min_conditional_acceptance: float = 0.5
    # Numerics and speed
    verify_width: Optional[int] = None
    width_invariant: bool = False
    pack_weights: bool = True
    compile: bool = False
    cuda_graphs: bool = True

    def __post_init__(self) -> None:
        _choice("drafter", self.drafter, DRAFTERS)
        _choice("gamma", self.gamma, GAMMAS)
        _choice("sampler", self.sampler, SAMPLERS)
        _choice("acceptance", self.acceptance, ACCEPTANCES)
        _at_least("num_speculative_tokens", self.num_speculative_tokens, 0, "0 is plain decoding")
        _at_least("ngram_min", self.ngram_min, 1)
        _at_least("ngram_max", self.ngram_max, self.ngram_min, "ngram_min")
        _at_least("max_batch_size", self.max_batch_size, 1)
        _at_least("prefill_chunk_tokens", self.prefill_chunk_tokens, 1)
        _at_least("max_draft_tokens", self.max_draft_tokens, 1)
        _at_least("max_gamma_spread", self.max_gamma_spread, 0)
        if self.max_length is not None:
            _at_least("max_length", self.max_length, 2, "or null for the longest request of each call")
        if self.max_prompt_tokens_to_speculate is not None:
            _at_least(
                "max_prompt_tokens_to_speculate",
                self.max_prompt_tokens_to_speculate,
                1,
                "or null for no limit",
            )
        self._check_tree()
        if self.verify_width is not None and self.verify_width < self.max_proposals + 1:
            raise ValueError(
                f"verify_width={self.verify_width}: must be at least num_speculative_tokens (or nodes of the tree) + 1 = "
                f"{self.max_proposals + 1}, or null for exactly that"
            )
        for name in ("draft_confidence", "min_conditional_acceptance"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name}={getattr(self, name)}: must lie in [0, 1] (0 switches it off)")
        if self.drafter == "ngram" and self.draft_confidence > 0:
            raise ValueError(
                f"draft_confidence={self.draft_confidence}: drafter='ngram' has no probabilities to go by; set it to 0, "
                "and raise ngram_min to propose less often"
            )
        self._check_medusa()
        if not 0.0 <= self.synthetic_acceptance <= 1.0:
            raise ValueError(f"synthetic_acceptance={self.synthetic_acceptance}: must lie in [0, 1]")
        for name in ("eta", "lenience"):
            if not 0.0 < getattr(self, name) <= 1.0:
                raise ValueError(f"{name}={getattr(self, name)}: must lie in (0, 1]")
        if self.kv_memory_limit_gib is not None and self.kv_memory_limit_gib <= 0:
            raise ValueError(
                f"kv_memory_limit_gib={self.kv_memory_limit_gib}: must be > 0, or null for the free memory"
            )

    def _check_medusa(self) -> None:
        """All heads run at once: there is no step to leave out when a row is not sure enough."""
        for name, value in (("gamma", "fixed"), ("draft_confidence", 0.0), ("compile", False)):
            if self.drafter == "medusa" and getattr(self, name) != value:
                raise ValueError(f"{name}={getattr(self, name)!r}: with drafter='medusa' only {value!r} is possible")

    def _check_tree(self) -> None:
        tree = self.topology
        if tree is None:
            return
        from specdec_runtime.tree import DynamicTree  # late, as in `topology`

        if tree.depth > self.num_speculative_tokens:
            raise ValueError(
                f"num_speculative_tokens={self.num_speculative_tokens}: below the tree's depth of {tree.depth}; raise it, or "
                "take a flatter tree"
            )
        if self.drafter == "ngram":
            raise ValueError("drafter='ngram': with a tree only 'model' and 'medusa' are possible; set tree=null")
        if self.acceptance in ("lenient", "synthetic"):
            raise ValueError(
                f"acceptance={self.acceptance!r}: with a tree only 'exact' and 'typical' are possible; set tree=null"
            )
        if self.acceptance != "exact" and isinstance(tree, DynamicTree):
            raise ValueError(
                f"acceptance={self.acceptance!r}: with the dynamic tree {self.tree!r} only 'exact' is possible; take a fixed one, "
                "such as '3x2x1'"
            )
        chains_only = {"gamma": "fixed", "draft_confidence": 0.0}
        for name, value in chains_only.items():
            if getattr(self, name) != value:
                raise ValueError(
                    f"{name}={getattr(self, name)!r}: with a tree only {value!r} is possible; set tree=null"
                )

    @property
    def topology(self) -> "Tree | DynamicTree | None":
        """The tree that is proposed in a round, or its bounds; None for a chain, and in plain decoding."""
        if self.tree is None or self.num_speculative_tokens == 0:
            return None
        # It brings in torch, which settings without a tree do not need.
        from specdec_runtime.tree import make_tree

        return make_tree(self.tree, max_nodes=min(self.max_draft_tokens, MAX_TREE_NODES))

    @property
    def max_proposals(self) -> int:
        """Most proposals of a row in a round: gamma, or the nodes of the tree."""
        tree = self.topology
        return self.num_speculative_tokens if tree is None else tree.num_nodes

    @property
    def lossless(self) -> bool:
        """Whether the acceptance rule keeps the target's distribution."""
        return self.acceptance == "exact"

    @property
    def fixed_width(self) -> Optional[int]:
        """Tokens per row to which every decode forward is padded; None when a forward is as wide as its proposals."""
        if self.verify_width is not None or not self.width_invariant:
            return self.verify_width
        return max(INVARIANT_WIDTH, self.max_proposals + 1)


def _choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name}={value!r}: choose from {list(choices)}")


def _at_least(name: str, value: int, minimum: int, hint: str = "") -> None:
    if not hasattr(value, "__index__"):
        raise ValueError(f"{name}={value!r}: must be a whole number")
    if value < minimum:
        raise ValueError(f"{name}={value}: must be >= {minimum}" + (f" ({hint})" if hint else ""))
