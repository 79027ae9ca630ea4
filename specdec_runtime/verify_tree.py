"""The verification rule for trees of proposals: which path stands, and what comes after its last token.

Shape legend: B rows, N nodes, T = N + 1 positions (root and nodes), D depth of the tree, E = D + 1, I positions with children,
V vocabulary, C ids that can be proposed (C = V, or a shortlist), K children. p is the target's distribution and q the
proposer's, both after all warpers, both fp32.
"""

from typing import NamedTuple, Optional

import torch
from torch import Tensor

from specdec_runtime.tree import Tree
from specdec_runtime.verify import residual, sample_by_inverse_cdf


class TreeVerdict(NamedTuple):
    """`path_BD`: the accepted nodes from the root on, -1 behind the last of the `num_accepted_B`. `next_ids_B` follows
    them: a correction, or the bonus behind a leaf."""

    num_accepted_B: Tensor
    path_BD: Tensor
    next_ids_B: Tensor


def verify_tree(
    tree: Tree,
    *,
    draft_ids_BN: Tensor,
    max_depth_B: Tensor,
    target_probs_BTV: Tensor,
    draft_probs_BIC: Optional[Tensor] = None,
    draft_vocab_ids_C: Optional[Tensor] = None,
    accept_uniform_BN: Tensor,
    next_uniform_BE: Tensor,
) -> TreeVerdict:
    """Multi-round speculative sampling (SpecInfer, arXiv 2305.09781) for siblings drawn without replacement: the committed
    tokens follow p exactly.

    From the root on, the children of a position are tried in their order. Child x stands when u q(x) < p(x), and is then
    the next position. When it falls, p becomes the residual max(p - q, 0), renormalised, x is taken out of q, which is
    renormalised too, and its next sibling is tried with these. When all have fallen, the next token is drawn from what p has
    become; behind a leaf, from p itself. Each child was drawn from the very q that it is tried with, so every trial
    is the rule of `verify_chain`, and a tree without branches is a chain.

    Where nothing of q is left (its top_k is smaller than the number of children, or it has temperature 0), a child was chosen
    without chance, and q is one-hot at it.

    Args:
        max_depth_B: nodes beyond this depth do not count in a row.
        target_probs_BTV: p at each position; position i + 1 follows node i.
        draft_probs_BIC: q at the positions `tree.inner`, from which the first of their children was drawn; None: all
            children were chosen without chance.
        draft_vocab_ids_C: the ids of q's columns; None: all V. q is zero elsewhere.
        accept_uniform_BN, next_uniform_BE: independent uniform numbers in [0, 1).
    """
    device, num_rows = draft_ids_BN.device, draft_ids_BN.shape[0]
    children_TK, rows_B = tree.child_table(device), torch.arange(num_rows, device=device)
    inner_of_T = torch.zeros(tree.num_nodes + 1, dtype=torch.long, device=device)
    inner_of_T[list(tree.inner)] = torch.arange(len(tree.inner), device=device)

    at_B, p_BV, path = torch.zeros_like(max_depth_B), target_probs_BTV[:, 0], []
    goes_on_B = torch.ones_like(max_depth_B, dtype=torch.bool)
    for depth in range(tree.depth):
        goes_on_B = goes_on_B & (depth < max_depth_B)
        found_B = torch.full_like(at_B, -1)
        q_BV = torch.zeros_like(p_BV)
        if draft_probs_BIC is not None:
            q_BC = draft_probs_BIC[rows_B, inner_of_T[at_B]]
            q_BV = q_BC if draft_vocab_ids_C is None else q_BV.index_copy(1, draft_vocab_ids_C, q_BC)
        for rank in range(tree.max_children_at(depth)):
            child_B = children_TK[at_B, rank]
            is_tried_B = goes_on_B & (found_B < 0) & (child_B >= 0)
            node_B1 = child_B.clamp(min=0)[:, None]
            ids_B1 = draft_ids_BN.gather(1, node_B1)
            drawn_from_BV = _drawn_from(q_BV, ids_B1)
            u_B1 = accept_uniform_BN.gather(1, node_B1)
            stands_B = (u_B1 * drawn_from_BV.gather(1, ids_B1) < p_BV.gather(1, ids_B1)).squeeze(1)
            found_B = torch.where(is_tried_B & stands_B, child_B, found_B)
            fallen_BV = residual(p_BV, drawn_from_BV, None)
            fallen_BV = fallen_BV / fallen_BV.sum(dim=1, keepdim=True)
            p_BV = torch.where((is_tried_B & ~stands_B)[:, None], fallen_BV, p_BV)
            q_BV = _without(q_BV, ids_B1)
        goes_on_B = found_B >= 0
        at_B = torch.where(goes_on_B, found_B + 1, at_B)
        p_BV = torch.where(goes_on_B[:, None], target_probs_BTV[rows_B, at_B], p_BV)
        path.append(found_B)
    path_BD = torch.stack(path, dim=1)
    num_accepted_B = (path_BD >= 0).sum(dim=1)
    next_u_B = next_uniform_BE.gather(1, num_accepted_B[:, None]).squeeze(1)
    return TreeVerdict(num_accepted_B, path_BD, sample_by_inverse_cdf(p_BV, next_u_B))


def verify_tree_by_argmax(
    tree: Tree, *, draft_ids_BN: Tensor, max_depth_B: Tensor, target_ids_BT: Tensor
) -> TreeVerdict:
    """The same at temperature 0: the path of nodes that are p's argmax, then the argmax behind them.

    Args:
        draft_ids_BN: siblings differ. target_ids_BT: argmax of p at each position.
    """
    device = draft_ids_BN.device
    children_TK = tree.child_table(device)
    at_B, path = torch.zeros_like(max_depth_B), []
    goes_on_B = torch.ones_like(max_depth_B, dtype=torch.bool)
    for depth in range(tree.depth):
        goes_on_B = goes_on_B & (depth < max_depth_B)
        wanted_B1 = target_ids_BT.gather(1, at_B[:, None])
        child_BK = children_TK[at_B]
        is_right_BK = (draft_ids_BN.gather(1, child_BK.clamp(min=0)) == wanted_B1) & (child_BK >= 0)
        first_B1 = is_right_BK.long().argmax(dim=1, keepdim=True)
        goes_on_B = goes_on_B & is_right_BK.any(dim=1)
        found_B = child_BK.gather(1, first_B1).squeeze(1).masked_fill(~goes_on_B, -1)
        at_B = torch.where(goes_on_B, found_B + 1, at_B)
        path.append(found_B)
    path_BD = torch.stack(path, dim=1)
    next_ids_B = target_ids_BT.gather(1, at_B[:, None]).squeeze(1)
    return TreeVerdict((path_BD >= 0).sum(dim=1), path_BD, next_ids_B)


def verify_tree_by_verdicts(
    tree: Tree,
    *,
    accept_BN: Tensor,
    max_depth_B: Tensor,
    target_probs_BTV: Tensor,
    next_uniform_BE: Tensor,
) -> TreeVerdict:
    """The longest path of nodes that a lossy rule lets stand, the first of several; then a token from p behind it.

    Args:
        accept_BN: the rule's verdict on each node by itself.
    """
    device, rows_B = accept_BN.device, torch.arange(accept_BN.shape[0], device=accept_BN.device)
    depths_N = tree.offsets(device)[1:]
    fell_BN = ~accept_BN | (depths_N > max_depth_B[:, None])
    is_reached_BN = ~(fell_BN[:, None, :] & tree.sees(device)[1:, 1:]).any(dim=2)
    length_BN = is_reached_BN * depths_N
    num_accepted_B, last_B = length_BN.amax(dim=1), length_BN.argmax(dim=1)
    none_B = num_accepted_B == 0
    path_BD = tree.line_table(device)[last_B].masked_fill(none_B[:, None], -1)
    next_probs_BV = target_probs_BTV[rows_B, (last_B + 1).masked_fill(none_B, 0)]
    next_u_B = next_uniform_BE.gather(1, num_accepted_B[:, None]).squeeze(1)
    return TreeVerdict(num_accepted_B, path_BD, sample_by_inverse_cdf(next_probs_BV, next_u_B))


def sample_without_replacement(probs_BC: Tensor, uniform_BK: Tensor, ranking_BC: Tensor) -> Tensor:
    """Draws K different columns per row, one after another, each from what the ones before it have left of q.

    Args:
        probs_BC: q. uniform_BK: independent uniform numbers in [0, 1).
        ranking_BC: where nothing of q is left, the column with the largest of these that was not taken is chosen.
    """
    columns = []
    for rank in range(uniform_BK.shape[1]):
        drawn_B = sample_by_inverse_cdf(probs_BC, uniform_BK[:, rank])
        column_B1 = torch.where(probs_BC.sum(dim=1) > 0, drawn_B, ranking_BC.argmax(dim=1))[:, None]
        probs_BC = _without(probs_BC, column_B1)
        ranking_BC = ranking_BC.scatter(1, column_B1, -torch.inf)
        columns.append(column_B1)
    return torch.cat(columns, dim=1)


def _drawn_from(left_BV: Tensor, ids_B1: Tensor) -> Tensor:
    """The distribution that a child was drawn from: what is left of q, renormalised, or one-hot where nothing is."""
    mass_B1 = left_BV.sum(dim=1, keepdim=True)
    one_hot_BV = torch.zeros_like(left_BV).scatter_(1, ids_B1, 1.0)
    return torch.where(mass_B1 > 0, left_BV / mass_B1, one_hot_BV)


def _without(q_BV: Tensor, ids_B1: Tensor) -> Tensor:
    """q with a child that was tried taken out; not renormalised."""
    return q_BV.scatter(1, ids_B1, 0.0)
