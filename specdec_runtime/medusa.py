"""Proposals by Medusa's heads, from the target's own hidden state: no second model, no cache of its own.

Shape legend: B rows, N nodes of a tree, C ids that the heads score, H hidden size, L positions of one depth.
"""

from collections.abc import Sequence
from functools import cache
from typing import Optional

import torch
from torch import Tensor

from specdec_runtime.batch import Batch
from specdec_runtime.dynamic_growth import DynamicGrowth
from specdec_runtime.forward import ModelRunner
from specdec_runtime.medusa_heads import MedusaHeads
from specdec_runtime.packed import packed
from specdec_runtime.proposal import Proposal
from specdec_runtime.scheduler import Row
from specdec_runtime.stopwatch import Stopwatch
from specdec_runtime.tree import DynamicTree, Tree
from specdec_runtime.tree_growth import Growth


@cache
def _chain(num_tokens: int) -> Tree:
    return Tree(tuple(range(-1, num_tokens - 1)))


class MedusaDrafter:
    """Head k proposes the k-th token behind the last committed one, from the hidden state of the position before that.

    Its q depends on that hidden state only, and not on the tokens between: all nodes of one depth have the same q (but for
    penalties, which follow the path). A tree is therefore a product of the heads' guesses, as in the paper. It is sampled
    without replacement and judged as any other, so that the target's distribution is kept.

    Args:
        heads: made for this target. sampler: "probabilistic" or "greedy", as for a draft model.
        num_tokens: most tokens of a chain, or the depth of the tree. tree: None for a chain.
        max_draft_tokens: most nodes of a round, over all rows. packs: whether weights are packed for the CPU.

    Raises:
        ValueError: heads of another target, fewer heads than tokens, or fewer ids than children.
    """

    def __init__(
        self,
        heads: MedusaHeads,
        target: ModelRunner,
        *,
        sampler: str,
        num_tokens: int,
        tree: Tree | DynamicTree | None,
        max_draft_tokens: int,
        packs: bool,
    ) -> None:
        heads.require_target(target.model)
        if num_tokens > heads.shape.num_heads:
            raise ValueError(
                f"num_speculative_tokens={num_tokens}: there are {heads.shape.num_heads} Medusa heads, each for one token; lower "
                "it, or train more heads (draft.num_heads)"
            )
        most = max(map(len, tree.children)) if isinstance(tree, Tree) else 1
        if most > heads.shape.num_ids:
            raise ValueError(f"tree: {most} children of one position, but the heads have {heads.shape.num_ids} ids")
        heads = heads.to(target.device).eval()
        self.heads: MedusaHeads = packed(heads, "Medusa heads") if packs else heads
        is_whole = heads.shape.num_ids == heads.shape.vocab_size
        self.vocab_ids_N: Optional[Tensor] = None if is_whole else heads.vocab_ids_N
        self.sampler, self.tree, self.max_draft_tokens = sampler, tree, max_draft_tokens
        self.runner: Optional[ModelRunner] = None
        self.wants_hidden = True
        self._prefix = cache(tree.prefix) if isinstance(tree, Tree) else None

    def catch_up(self, rows: Sequence[Row], wanted: Sequence[int], *, chunk: int) -> None:
        """Nothing: the engine keeps the hidden state of each row's last verified position, `row.hidden_H`."""

    def propose(
        self,
        batch: Batch,
        wanted: Sequence[int],
        uniform_PBT: Optional[Tensor],
        watch: Stopwatch,
        *,
        confidence: float = 0.0,
    ) -> Proposal:
        """One pass through the heads for all rows; `wanted` bounds the depth of each. The heads know no `confidence`."""
        if isinstance(self.tree, DynamicTree):
            return self._propose_dynamic(self.tree, batch, wanted, watch)
        rows, wanted_B = batch.rows, batch.column(wanted)
        tree = self._topology(max(wanted), len(rows))
        growth = Growth.start(tree, batch, uniform_PBT, sampler=self.sampler, vocab_ids_C=self.vocab_ids_N)
        with watch.phase("draft"):
            logits_BKC = self.heads(_hidden(rows), tree.depth)
        probs = []
        for depth in range(tree.depth):
            positions = growth.positions_at(depth)
            logits_BLC = logits_BKC[:, depth, None].expand(-1, len(positions), -1)
            probs.append(growth.fill(positions, logits_BLC))
        for row, num in zip(rows, wanted, strict=True):
            row.times.num_draft_steps += 1 if num else 0
        q_BIC = None if growth.noise_BN is None else torch.cat([q for q in probs if q is not None], dim=1)
        return Proposal(
            growth.ids_BN, wanted_B.clamp(max=tree.depth), q_BIC, None if self.tree is None else tree
        )

    def _propose_dynamic(
        self, tree: DynamicTree, batch: Batch, wanted: Sequence[int], watch: Stopwatch
    ) -> Proposal:
        """The likeliest nodes; the heads' logits at a depth are the same behind all of them."""
        rows, depth = batch.rows, min(tree.depth, max(wanted))
        with watch.phase("draft"):
            logits_BKC = self.heads(_hidden(rows), depth)
        growth = DynamicGrowth(tree, batch, self.vocab_ids_N)
        for step in range(depth):
            growth.add_children(logits_BKC[:, step, None].expand(-1, growth.ids_BL.shape[1], -1))
            if step + 1 < depth:
                growth.expand()
        for row, num in zip(rows, wanted, strict=True):
            row.times.num_draft_steps += 1 if num else 0
        depth_B = batch.column(wanted).clamp(max=depth)
        grown = growth.finish(tree.nodes_per_row(len(rows), self.max_draft_tokens), depth_B)
        return Proposal(grown.ids_BN, depth_B, None, grown.trees)

    def _topology(self, max_depth: int, num_rows: int) -> Tree:
        if self._prefix is None:
            return _chain(max_depth)
        return self._prefix(max_depth=max_depth, max_nodes=max(1, self.max_draft_tokens // num_rows))

    def settle(self, row: Row, *, num_accepted: int, num_drafted: int) -> None:
        """Nothing: there is no cache."""

    def move(self, source: int, destination: int, row: Row) -> None:
        """Nothing: the hidden state is the row's own."""


def _hidden(rows: Sequence[Row]) -> Tensor:
    states = [row.hidden_H for row in rows]
    assert all(state is not None for state in states)
    return torch.stack([state for state in states if state is not None])
