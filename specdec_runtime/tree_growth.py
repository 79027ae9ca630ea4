"""A tree of proposals under way: the children of each position, chosen from what proposes there.

Shape legend: B rows, N nodes, L positions of one depth that have children, C ids that can be proposed, K children of a position.
"""

from typing import NamedTuple, Optional

import torch
from torch import Tensor

from specdec_runtime.batch import Batch
from specdec_runtime.layout import layout_of
from specdec_runtime.noise import DRAFT
from specdec_runtime.proposal import node_noise
from specdec_runtime.tree import Tree
from specdec_runtime.verify_tree import sample_without_replacement


class Growth(NamedTuple):
    """`ids_BN` is filled depth by depth; `noise_BN` is None when nodes are chosen without chance. `vocab_ids_C`: the ids of
    the proposer's columns, None for all."""

    tree: Tree
    batch: Batch
    ids_BN: Tensor
    noise_BN: Optional[Tensor]
    vocab_ids_C: Optional[Tensor]

    @classmethod
    def start(
        cls, tree: Tree, batch: Batch, uniform_PBT: Optional[Tensor], *, sampler: str, vocab_ids_C: Optional[Tensor]
    ) -> "Growth":
        """A tree without nodes; they will be drawn by chance where a row is sampled and `sampler` is not "greedy"."""
        noise_BN = None
        if sampler != "greedy" and not batch.sampling.all_greedy:
            assert uniform_PBT is not None
            noise_BN = node_noise(uniform_PBT, DRAFT, tree)
        ids_BN = torch.zeros(len(batch.rows), tree.num_nodes, dtype=torch.long, device=batch.device)
        return cls(tree, batch, ids_BN, noise_BN, vocab_ids_C)

    def positions_at(self, depth: int) -> tuple[int, ...]:
        """Those of a depth that have children."""
        return tuple(p for p in self.tree.positions_at(depth) if self.tree.children[p])

    def fill(self, positions: tuple[int, ...], logits_BLC: Tensor) -> Optional[Tensor]:
        """Fills in the nodes behind these positions; returns q [B, L, C] at them when the nodes were drawn from it.

        At temperature 0, or without noise, the children of a position are its most likely ids, in that order; otherwise they
        are drawn from q without replacement.
        """
        sampling, ids_BN = self.batch.sampling, self.ids_BN
        adjusted_BLC = sampling.adjust(
            logits_BLC,
            num_generated_B=self.batch.num_generated(),
            proposed_BG=ids_BN,
            first_offset=0,
            vocab_ids_N=self.vocab_ids_C,
            layout=layout_of(self.tree, positions, ids_BN.device),
        )
        q_BLC = None if self.noise_BN is None else sampling.warp(adjusted_BLC)
        for i, position in enumerate(positions):
            nodes = list(self.tree.children[position])
            if q_BLC is None or self.noise_BN is None:
                columns_BK = adjusted_BLC[:, i].topk(len(nodes), dim=1).indices
            else:
                noise_BK = self.noise_BN[:, nodes]
                columns_BK = sample_without_replacement(q_BLC[:, i], noise_BK, adjusted_BLC[:, i])
            ids_BN[:, nodes] = columns_BK if self.vocab_ids_C is None else self.vocab_ids_C[columns_BK]
        return q_BLC
