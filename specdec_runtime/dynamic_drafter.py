"""A draft model that proposes trees whose shape it chooses itself.

Shape legend: B rows, L nodes of one depth that are expanded, C ids the draft can propose.
"""

from collections.abc import Sequence
from typing import Any, Optional

from torch import Tensor
from transformers import PreTrainedModel

from specdec_runtime.batch import Batch
from specdec_runtime.drafter import Drafter, round_settings
from specdec_runtime.dynamic_growth import DynamicGrowth
from specdec_runtime.proposal import Proposal
from specdec_runtime.scheduler import Row
from specdec_runtime.stopwatch import Stopwatch
from specdec_runtime.tree import DynamicTree
from specdec_runtime.tree_drafter import step_from_root


class DynamicTreeDrafter(Drafter):
    """Proposes the likeliest nodes, one draft forward per depth over those that are expanded. What is proposed is a function of
    the committed tokens, whatever `sampler` says.

    Args:
        tree: bounds of the trees; with many rows each has at most its share of `max_draft_tokens`.
        model, settings: as for `Drafter`.
    """

    def __init__(
        self, model: PreTrainedModel, tree: DynamicTree, *, max_draft_tokens: int, **settings: Any
    ) -> None:
        super().__init__(model, **settings)
        self.tree, self.max_draft_tokens = tree, max_draft_tokens

    def propose(
        self,
        batch: Batch,
        wanted: Sequence[int],
        uniform_PBT: Optional[Tensor],
        watch: Stopwatch,
        *,
        confidence: float = 0.0,
    ) -> Proposal:
        """See `Drafter.propose`; `wanted` bounds the depth of each row. No chance and no `confidence` play a part."""
        rows, wanted_B = batch.rows, batch.column(wanted)
        depth = min(self.tree.depth, max(wanted))
        growth = DynamicGrowth(self.tree, batch, self.vocab_ids_N)
        lengths_B = batch.column([len(row.token_ids) for row in rows])
        settings = round_settings(batch, wanted, num_places=self.tree.num_draft_places)
        for step in range(depth):
            with watch.phase("draft"):
                if step == 0:
                    logits_BLC = step_from_root(self.runner, batch, lengths_B, **settings)
                else:
                    logits_BLC = self.runner.step(growth.ids_BL, lengths_B - 1, layout=growth.layout, **settings)
            growth.add_children(logits_BLC[..., : self.num_columns])
            if step + 1 < depth:
                growth.expand()
        for row, num in zip(rows, wanted, strict=True):
            row.times.num_draft_steps += depth if num else 0
        depth_B = wanted_B.clamp(max=depth)
        grown = growth.finish(self.tree.nodes_per_row(len(rows), self.max_draft_tokens), depth_B)
        return Proposal(grown.ids_BN, depth_B, None, grown.trees, grown.draft_nodes_BN)

    def settle(self, row: Row, *, num_accepted: int, num_drafted: int) -> None:
        """All accepted nodes but the last were fed; the last two committed tokens are fed again."""
        row.draft_valid = len(row.token_ids) + max(0, num_accepted - 1)
