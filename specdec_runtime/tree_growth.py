"""A tree of proposals under way: the children of each position, chosen from what proposes there.

Shape legend: B rows, N nodes, L positions of one depth that have children, C ids that can be proposed, K children of a position,
M positions of all rows.
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
        num_children = [len(self.tree.children[position]) for position in positions]
        for num in sorted(set(num_children)):  # all that have as many at once
            chosen = [i for i, own in enumerate(num_children) if own == num]
            nodes = [node for i in chosen for node in self.tree.children[positions[i]]]
            if q_BLC is None or self.noise_BN is None:
                columns_BLK = adjusted_BLC[:, chosen].topk(num, dim=2).indices
            else:
                noise_MK = self.noise_BN[:, nodes].reshape(-1, num)
                q_MC, ranking_MC = (x_BLC[:, chosen].flatten(0, 1) for x_BLC in (q_BLC, adjusted_BLC))
                columns_BLK = sample_without_replacement(q_MC, noise_MK, ranking_MC)
            columns_BN = columns_BLK.reshape(-1, len(nodes))
            ids_BN[:, nodes] = columns_BN if self.vocab_ids_C is None else self.vocab_ids_C[columns_BN]
        return q_BLC
