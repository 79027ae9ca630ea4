"""A draft model that proposes a tree: several guesses for a position, each with guesses of its own behind it.

Shape legend: B rows, N nodes, L positions of one depth that have children, C ids the draft can propose, K children of a position.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any, Optional

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec_runtime.batch import Batch
from specdec_runtime.drafter import Drafter, round_settings
from specdec_runtime.forward import ModelRunner
from specdec_runtime.layout import layout_of
from specdec_runtime.proposal import Proposal
from specdec_runtime.scheduler import Row
from specdec_runtime.stopwatch import Stopwatch
from specdec_runtime.tree import Tree
from specdec_runtime.tree_growth import Growth


class TreeDrafter(Drafter):
    """Proposes the nodes of a fixed topology, one draft forward per depth.

    At temperature 0, or with the greedy sampler, the children of a position are the draft's most likely ids, in that order;
    otherwise they are drawn from q without replacement.

    Args:
        tree: a round uses the part of it that its rows still need and `max_draft_tokens`, over all rows, allows.
        model, settings: as for `Drafter`.

    Raises:
        ValueError: a position has more children than there are ids to propose.
    """

    def __init__(self, model: PreTrainedModel, tree: Tree, *, max_draft_tokens: int, **settings: Any) -> None:
        super().__init__(model, **settings)
        self.tree, self.max_draft_tokens = tree, max_draft_tokens
        num_ids = self.runner.vocab_size if self.num_columns is None else self.num_columns
        most = max(map(len, tree.children))
        if most > num_ids:
            raise ValueError(
                f"tree: {most} children of one position, but the draft has {num_ids} ids to propose"
            )
        self._prefix = cache(tree.prefix)

    def propose(
        self,
        batch: Batch,
        wanted: Sequence[int],
        uniform_PBT: Optional[Tensor],
        watch: Stopwatch,
        *,
        confidence: float = 0.0,
    ) -> Proposal:
        """See `Drafter.propose`; `wanted` bounds the depth of each row. Trees know no `confidence`."""
        rows, wanted_B = batch.rows, batch.column(wanted)
        max_nodes = max(1, self.max_draft_tokens // len(rows))
        tree = self._prefix(max_depth=max(wanted), max_nodes=max_nodes)
        growth = Growth.start(tree, batch, uniform_PBT, sampler=self.sampler, vocab_ids_C=self.vocab_ids_N)
        lengths_B = batch.column([len(row.token_ids) for row in rows])
        settings = round_settings(batch, wanted, num_places=tree.num_nodes)
        probs = []
        for depth in range(tree.depth):
            positions = growth.positions_at(depth)
            with watch.phase("draft"):
                logits_BLC = self._forward(growth, positions, lengths_B, is_root=depth == 0, **settings)
            probs.append(growth.fill(positions, logits_BLC[..., : self.num_columns]))
        for row, num in zip(rows, wanted, strict=True):
            row.times.num_draft_steps += tree.depth if num else 0
        q_BIC = (
            None if growth.noise_BN is None else torch.cat([q_BLC for q_BLC in probs if q_BLC is not None], dim=1)
        )
        return Proposal(growth.ids_BN, wanted_B.clamp(max=tree.depth), q_BIC, tree)

    def _forward(
        self, growth: Growth, positions: tuple[int, ...], lengths_B: Tensor, *, is_root: bool, **settings: Any
    ) -> Tensor:
        """Logits at positions of one depth. The root comes with the token before it, as in `Drafter.propose`."""
        if is_root:
            return step_from_root(self.runner, growth.batch, lengths_B, **settings)
        layout = layout_of(growth.tree, positions, growth.ids_BN.device)
        feed = growth.ids_BN[:, layout.slots_BL[0] - 1]
        return self.runner.step(feed, lengths_B - 1, layout=layout, **settings)

    def settle(self, row: Row, *, num_accepted: int, num_drafted: int) -> None:
        """All accepted nodes but the last were fed, and lie behind the root; the last two committed tokens are fed again."""
        row.draft_valid = len(row.token_ids) + max(0, num_accepted - 1)


def step_from_root(runner: ModelRunner, batch: Batch, lengths_B: Tensor, **settings: Any) -> Tensor:
    """A draft's logits [B, 1, V] behind the last committed tokens, fed with the ones before them, as in `Drafter.propose`."""
    last_two = [row.token_ids[-2:] for row in batch.rows]
    feed = torch.tensor(last_two, device=batch.device)
    return runner.step(feed, lengths_B - 2, num_logits=1, **settings)
