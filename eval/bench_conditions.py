"""What a benchmark compares: backend x draft x gamma or tree x temperature x batch size."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedModel

from eval.config import PLAIN_BACKENDS, BenchConfig
from eval.measured_runtime import fixed_chains
from eval.teacher_forcing import Draft
from specdec_runtime.backends.base import Backend
from specdec_runtime.backends.hf_assisted import HFAssisted
from specdec_runtime.backends.hf_generate import HFGenerate
from specdec_runtime.backends.native import NativeBackend
from specdec_runtime.backends.vllm import VLLMBackend
from specdec_runtime.config import MAX_TREE_NODES, DecoderConfig
from specdec_runtime.medusa_heads import MedusaHeads
from specdec_runtime.tree import DynamicTree, Tree, make_tree

NO_DRAFT = "none"
NGRAM = "ngram"  # proposals that are looked up in the text, without a draft


@dataclass(frozen=True)
class Condition:
    """One way to decode. Plain decoding has draft `none` and gamma 0; `ngram` looks its proposals up in the text.

    `gamma_policy`: "fixed", or "auto", where the engine chooses the proposal length and `gamma`
    is its upper bound. `tree`: a name, or the parents of its nodes; `gamma` is then its depth.
    """

    backend: str
    draft: str
    gamma: int
    temperature: float
    batch: int
    gamma_policy: str = "fixed"
    tree: str | tuple[int, ...] | None = None

    @property
    def is_plain(self) -> bool:
        """Whether it is a baseline."""
        return self.draft == NO_DRAFT

    @property
    def has_one_width(self) -> bool:
        """Whether all verifications are `width` tokens wide, so that plain decoding can be padded to the same width."""
        is_drafted = self.backend == "native" and self.draft not in (NO_DRAFT, NGRAM)
        return is_drafted and self.gamma_policy == "fixed"

    @property
    def width(self) -> int:
        """Tokens of a row's verification: the proposals, and the last committed token."""
        return 1 + (self.gamma if self.tree is None else tree_of(self.tree).num_nodes)


def tree_of(topology: str | Sequence[int]) -> Tree | DynamicTree:
    """The tree, whatever the batch. Raises ValueError for one that is none."""
    return make_tree(topology, max_nodes=MAX_TREE_NODES)


def tree_name(topology: str | Sequence[int]) -> str:
    """What tables and figures call a tree."""
    if isinstance(topology, str):
        return topology
    tree = tree_of(topology)
    return f"{tree.num_nodes}nodes{tree.depth}deep"


def conditions_at(
    config: BenchConfig, drafts: Mapping[str, Draft] | Sequence[str], *, temperature: float, batch: int
) -> list[Condition]:
    """All conditions of one temperature and batch size: they are compared, and run in alternation.

    Raises:
        ValueError: Medusa heads of which there are fewer than anything that was asked for proposes.
    """
    plain = [backend for backend in config.backends if backend in PLAIN_BACKENDS]
    result = [Condition(backend, NO_DRAFT, 0, temperature, batch) for backend in plain]
    for name in drafts:
        draft = drafts[name] if isinstance(drafts, Mapping) else None
        if draft is not None and isinstance(draft.model, MedusaHeads):
            result.extend(_of_heads(config, name, draft.model.shape.num_heads, temperature, batch))
            continue
        gammas, is_whole = config.gammas, name == "distilled" or config.undistilled_gammas is None
        if not is_whole:
            gammas = config.undistilled_gammas or []
        for gamma in gammas:
            if "native" in config.backends:
                result.append(Condition("native", name, gamma, temperature, batch))
            # Transformers' assisted generation has no batches.
            if "hf_assisted" in config.backends and batch == 1:
                result.append(Condition("hf_assisted", name, gamma, temperature, batch))
            if "vllm" in config.backends:
                result.append(Condition("vllm", name, gamma, temperature, batch))
        if config.auto_gamma and "native" in config.backends:
            result.append(Condition("native", name, max(config.gammas), temperature, batch, "auto"))
        if is_whole:
            result.extend(_of_trees(config, name, temperature, batch))
    if config.ngram_gammas and "native" in config.backends:
        ngram = [Condition("native", NGRAM, gamma, temperature, batch) for gamma in config.ngram_gammas]
        result.extend(ngram)
        if config.auto_gamma:
            result.append(replace(ngram[0], gamma=max(config.ngram_gammas), gamma_policy="auto"))
    return result


def _of_trees(config: BenchConfig, name: str, temperature: float, batch: int) -> list[Condition]:
    trees = [topology if isinstance(topology, str) else tuple(topology) for topology in config.trees]
    return [Condition("native", name, tree_of(t).depth, temperature, batch, tree=t) for t in trees]


def _of_heads(config: BenchConfig, name: str, num_heads: int, temperature: float, batch: int) -> list[Condition]:
    """The chains and trees that so many heads can propose; only this engine runs them, and there is no length to choose."""
    chains = [Condition("native", name, gamma, temperature, batch) for gamma in config.gammas]
    found = [c for c in (*chains, *_of_trees(config, name, temperature, batch)) if c.gamma <= num_heads]
    if not found:
        raise ValueError(
            f"bench.gammas={list(config.gammas)}, bench.trees={list(config.trees)}: the Medusa heads of draft {name!r} are "
            f"{num_heads}, and propose no more tokens than that; name a shorter one"
        )
    return found


class BackendFactory:
    """Makes backends, one per backend, draft, gamma, policy and batch size; temperatures share them."""

    def __init__(self, target: PreTrainedModel, drafts: Mapping[str, Draft], runtime: DecoderConfig) -> None:
        self.target = target
        self.drafts = drafts
        self.runtime = fixed_chains(runtime)
        self._made: dict[Condition, Backend] = {}

    def backend_of(self, condition: Condition) -> Backend:
        """The condition's backend."""
        key = replace(condition, temperature=0.0)
        if condition.backend == "vllm":  # takes a minute to load, and batches whatever it is given
            key = replace(key, batch=1)
        if key not in self._made:
            self._made[key] = self._make(condition)
        return self._made[key]

    def draft_memory_mb(self, condition: Condition) -> float | None:
        """MiB of what proposes, after it has run: its weights (without the copies that are packed for a CPU) and its own keys and
        values. 0 without a model; None where another engine keeps it."""
        if condition.draft in (NO_DRAFT, NGRAM):
            return 0.0
        backend, model = self.backend_of(condition), self.drafts[condition.draft].model
        if not isinstance(backend, NativeBackend):
            return None
        num_bytes: int = sum(x.numel() * x.element_size() for x in (*model.parameters(), *model.buffers()))
        drafter = backend.decoder.drafter
        runner = None if drafter is None else drafter.runner
        if runner is not None and runner.cache is not None:
            num_bytes += runner.kv_bytes_per_position * runner.cache.num_slots * runner.cache.capacity
        return num_bytes / 2**20

    def is_synthetic(self, condition: Condition) -> bool:
        """Whether proposals are accepted by chance, so that the tokens mean nothing."""
        is_native = condition.backend == "native" and not condition.is_plain
        return is_native and self.runtime.acceptance == "synthetic"

    def plain_at_width(self, width: int, batch: int) -> Backend:
        """Native plain decoding by forwards as wide as a verification: kernels round by width."""
        return self._plain(batch, verify_width=width)

    def _make(self, condition: Condition) -> Backend:
        if condition.backend.startswith("hf_generate"):
            # With a static cache `generate` compiles its step on CUDA: the strongest that
            # Transformers has there.
            is_static = condition.backend == "hf_generate_static"
            return HFGenerate(self.target, max_batch_size=condition.batch, static_cache=is_static)
        if condition.backend == "vllm":
            return self._vllm(condition)
        if condition.is_plain:
            return self._plain(condition.batch, verify_width=None)
        settings: dict[str, Any] = {
            "num_speculative_tokens": condition.gamma,
            "gamma": condition.gamma_policy,
            "max_batch_size": condition.batch,
        }
        if condition.draft == NGRAM:
            config = replace(self.runtime, **settings, drafter="ngram", draft_confidence=0.0)
            return NativeBackend(self.target, None, config)
        draft = self.drafts[condition.draft]
        if condition.tree is not None:
            settings |= {"tree": condition.tree, "draft_confidence": 0.0}
        if isinstance(draft.model, MedusaHeads):
            config = replace(self.runtime, **settings | {"drafter": "medusa", "draft_confidence": 0.0})
            return NativeBackend(self.target, draft.model, config)
        config = replace(self.runtime, **settings)
        if condition.backend == "hf_assisted":
            return HFAssisted(self.target, draft.model, num_speculative_tokens=condition.gamma)
        return NativeBackend(self.target, draft.model, config, draft_vocab_ids=draft.vocab_ids)

    def _plain(self, batch: int, *, verify_width: int | None) -> Backend:
        config = replace(
            self.runtime,
            num_speculative_tokens=0,
            acceptance="exact",
            max_batch_size=batch,
            verify_width=verify_width,
        )
        return NativeBackend(self.target, config=config)

    def _vllm(self, condition: Condition) -> Backend:
        """vLLM loads the folders that the models came from, in the target's dtype; its draft proposes by its whole head."""
        draft = None if condition.is_plain else self.drafts[condition.draft].model.name_or_path
        return VLLMBackend(
            self.target.name_or_path,
            draft,
            num_speculative_tokens=condition.gamma,
            sampler=self.runtime.sampler,
            dtype=str(self.target.dtype).removeprefix("torch."),
        )
