"""Trees that grow where the draft is sure of itself: the nodes with the largest joint probability, as many as are verified.

At each depth the likeliest nodes (`DynamicTree.num_expanded`) get their likeliest ids as children; of all children, those with the
largest product of probabilities along their paths are kept. A child is never likelier than its parent, so what is kept is a
tree (EAGLE-2, arXiv 2406.16858; OPT-Tree, arXiv 2406.17276).

Nothing is drawn: the tree is a function of the committed tokens, at every temperature. So it cannot change what is drawn from
the target along it (`verify_tree.verify_tree_by_draws`). To drop nodes by their probability after they were *sampled* from q would
change it, since what is left was not sampled from q any more.

Shape legend: B rows, N nodes that are kept, T = N + 1 positions, L nodes of one depth that are expanded, C ids that can be
proposed, K children of each, M all children, P places of the expanded nodes and the root.
"""

from typing import NamedTuple, Optional

import torch
from torch import Tensor

from specdec_runtime.batch import Batch
from specdec_runtime.layout import BlockLayout, RowTrees
from specdec_runtime.tree import DynamicTree

#: Most children of a node. Those behind them are almost never among the likeliest nodes of a tree.
MAX_CHILDREN = 8


class Grown(NamedTuple):
    """`ids_BN` of the nodes of `trees`. `draft_nodes_BN`: where in the draft's cache, counted from behind the root, a node's keys
    are; -1 for a node that the draft was not fed."""

    ids_BN: Tensor
    trees: RowTrees
    draft_nodes_BN: Tensor


class DynamicGrowth:
    """Trees under way, one per row. `ids_BL` and `layout` are those of the nodes that are expanded next: the root at first.

    Args:
        vocab_ids_C: the ids of the proposer's columns, None for all.
    """

    def __init__(self, shape: DynamicTree, batch: Batch, vocab_ids_C: Optional[Tensor]) -> None:
        self.shape, self.batch, self.vocab_ids_C = shape, batch, vocab_ids_C
        num_rows, device = len(batch.rows), batch.device
        zeros_B1 = torch.zeros(num_rows, 1, dtype=torch.long, device=device)
        sees_B1P = torch.zeros(num_rows, 1, 1 + shape.num_draft_places, dtype=torch.bool, device=device)
        sees_B1P[:, :, 0] = True
        self.ids_BL = zeros_B1  # the root's is not looked at
        self.layout = BlockLayout(zeros_B1, zeros_B1, sees_B1P, is_by_row=True)
        self._joint_BL = torch.zeros(num_rows, 1, device=device)
        self._children: list[tuple[Tensor, Tensor, Tensor]] = []  # of each depth: joint, ids and parents, [B, L * K]
        # Counted over all children from 1 on, 0 is the root: which ones are expanded next, and which ones were.
        self._expanded_BL, self._num_children = zeros_B1, 0
        self._fed: list[Tensor] = []
        self._fed_ids_BP = zeros_B1.expand(-1, shape.num_draft_places).clone()

    def add_children(self, logits_BLC: Tensor) -> None:
        """The likeliest ids behind the nodes that were expanded; their logits."""
        adjusted_BLC = self.batch.sampling.adjust(
            logits_BLC,
            num_generated_B=self.batch.num_generated(),
            proposed_BG=self._fed_ids_BP,
            first_offset=0,
            vocab_ids_N=self.vocab_ids_C,
            layout=self.layout,
        )
        log_q_BLC = self.batch.sampling.log_confidences(adjusted_BLC)
        num_children = min(MAX_CHILDREN, log_q_BLC.shape[2])
        log_q_BLK, columns_BLK = log_q_BLC.topk(num_children, dim=2)
        ids_BLK = columns_BLK if self.vocab_ids_C is None else self.vocab_ids_C[columns_BLK]
        joint_BLK = self._joint_BL[:, :, None] + log_q_BLK
        # What is no number would come first, and be kept without its parent.
        joint_BLK = joint_BLK.masked_fill(joint_BLK.isnan(), -torch.inf)
        parents_BLK = self._expanded_BL[:, :, None].expand_as(ids_BLK)
        self._children.append((joint_BLK.flatten(1), ids_BLK.flatten(1), parents_BLK.flatten(1)))

    def expand(self) -> None:
        """Chooses, among the children that were added last, those that get children."""
        joint_BM, ids_BM, _ = self._children[-1]
        num_before, num_parents = self._num_children, self._expanded_BL.shape[1]
        num = min(self.shape.num_expanded, joint_BM.shape[1])
        self._joint_BL, chosen_BL = joint_BM.topk(num, dim=1)
        self.ids_BL = ids_BM.gather(1, chosen_BL)
        self._expanded_BL, self._num_children = 1 + num_before + chosen_BL, num_before + joint_BM.shape[1]
        self._fed.append(self._expanded_BL)
        depth = len(self._children)
        first_place = 1 + (depth - 1) * self.shape.num_expanded
        places_L = torch.arange(first_place, first_place + num, device=ids_BM.device)
        parents_BL1 = (chosen_BL // (joint_BM.shape[1] // num_parents))[:, :, None]
        sees_BLP = self.layout.sees_BLT.gather(1, parents_BL1.expand(-1, -1, self.layout.sees_BLT.shape[2]))
        sees_BLP[:, torch.arange(num), places_L] = True
        places_BL = places_L.expand(len(ids_BM), -1)
        self.layout = BlockLayout(places_BL, torch.full_like(places_BL, depth), sees_BLP, is_by_row=True)
        self._fed_ids_BP[:, first_place - 1 : first_place - 1 + num] = self.ids_BL

    def finish(self, num_nodes: int, max_depth_B: Tensor) -> Grown:
        """The likeliest of all children, at most `num_nodes`, parents before their children. No row wants nodes beyond its
        `max_depth_B`: those come last."""
        joint_BM, ids_BM, parents_BM = (torch.cat(parts, dim=1) for parts in zip(*self._children, strict=True))
        num_nodes = min(num_nodes, joint_BM.shape[1])
        depth_of = [depth for depth, (joint, *_) in enumerate(self._children, 1) for _ in range(joint.shape[1])]
        depth_M = torch.tensor(depth_of, device=ids_BM.device)
        joint_BM = joint_BM.masked_fill(depth_M > max_depth_B[:, None], -torch.inf)
        # Stable: among equals those of lower depth come first, so that no node is kept without its parent.
        kept_BN = joint_BM.sort(dim=1, descending=True, stable=True).indices[:, :num_nodes].sort(dim=1).values
        position_BM = torch.zeros(len(ids_BM), joint_BM.shape[1] + 1, dtype=torch.long, device=ids_BM.device)
        positions_BN = torch.arange(1, num_nodes + 1, device=ids_BM.device).expand_as(kept_BN)
        position_BM.scatter_(1, kept_BN + 1, positions_BN)
        parents_BN = position_BM.gather(1, parents_BM.gather(1, kept_BN)) - 1
        depth = len(self._children)
        return Grown(
            ids_BM.gather(1, kept_BN),
            RowTrees(parents_BN, depth, _layout(parents_BN, depth_M[kept_BN], depth)),
            self._draft_nodes(joint_BM.shape[1]).gather(1, kept_BN),
        )

    def _draft_nodes(self, num_children: int) -> Tensor:
        """[B, M]: each child's place in the draft's cache behind the root's, -1 where it was not expanded."""
        nodes_BM = torch.full(
            (len(self._fed_ids_BP), num_children + 1), -1, dtype=torch.long, device=self._fed_ids_BP.device
        )
        for depth, fed_BL in enumerate(self._fed):
            first = depth * self.shape.num_expanded
            nodes_L = torch.arange(first, first + fed_BL.shape[1], device=fed_BL.device)
            nodes_BM.scatter_(1, fed_BL, nodes_L.expand_as(fed_BL))
        return nodes_BM[:, 1:]


def _layout(parents_BN: Tensor, depths_BN: Tensor, depth: int) -> BlockLayout:
    """Of the root and all nodes."""
    num_rows, num_nodes = parents_BN.shape
    places_T = torch.arange(num_nodes + 1, device=parents_BN.device)
    sees_BTT = torch.eye(num_nodes + 1, dtype=torch.bool, device=parents_BN.device).repeat(num_rows, 1, 1)
    parents_BT = torch.nn.functional.pad(parents_BN + 1, (1, 0))
    ancestors_BT = parents_BT
    for _ in range(depth):  # the root is its own parent
        sees_BTT.scatter_(2, ancestors_BT[:, :, None], True)
        ancestors_BT = parents_BT.gather(1, ancestors_BT)
    offsets_BT = torch.nn.functional.pad(depths_BN, (1, 0))
    return BlockLayout(places_T.expand(num_rows, -1), offsets_BT, sees_BTT, is_by_row=True)
