"""The verification rule for trees of proposals: which path stands, and what comes after its last token.

Shape legend: B rows, N nodes, T = N + 1 positions (root and nodes), D depth of the tree, E = D + 1, I positions with children,
V vocabulary, C ids that can be proposed (C = V, or a shortlist), K children. p is the target's distribution and q the
proposer's, both after all warpers, both fp32.
"""

from collections.abc import Callable
from typing import NamedTuple, Optional, Protocol

import torch
from torch import Tensor

from specdec_runtime.layout import RowTrees
from specdec_runtime.tree import Tree
from specdec_runtime.verify import residual, sample_by_inverse_cdf


class TreeVerdict(NamedTuple):
    """`path_BD`: the accepted nodes from the root on, -1 behind the last of the `num_accepted_B`. `next_ids_B` follows
    them: a correction, or the bonus behind a leaf."""

    num_accepted_B: Tensor
    path_BD: Tensor
    next_ids_B: Tensor


class ByPosition(Protocol):
    """Something of the target at one position of each row, `[rows_B, positions_B]`: a tensor [B, T, ...], or what computes it for the
    few positions that are looked at."""

    def __getitem__(self, index: tuple[Tensor, Tensor], /) -> Tensor: ...


def verify_tree(
    tree: Tree,
    *,
    draft_ids_BN: Tensor,
    max_depth_B: Tensor,
    target_probs_BTV: ByPosition,
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

    at_B, path = torch.zeros_like(max_depth_B), []
    p_BV = target_probs_BTV[rows_B, at_B]
    goes_on_B = torch.ones_like(max_depth_B, dtype=torch.bool)
    for depth in range(tree.depth):
        goes_on_B = goes_on_B & (depth < max_depth_B)
        child_BK = children_TK[at_B, : tree.max_children_at(depth)]
        node_BK = child_BK.clamp(min=0)
        siblings = _Siblings(
            ids_BK=draft_ids_BN.gather(1, node_BK),
            is_there_BK=goes_on_B[:, None] & (child_BK >= 0),
            uniform_BK=accept_uniform_BN.gather(1, node_BK),
        )
        if draft_probs_BIC is None:
            rank_B, p_BV = _try_in_turn(siblings, p_BV, torch.zeros_like(p_BV), None)
        else:
            q_BC = draft_probs_BIC[rows_B, inner_of_T[at_B]]
            rank_B, p_BV = _try_in_turn(siblings, p_BV, q_BC, draft_vocab_ids_C)
        goes_on_B = rank_B >= 0
        found_B = child_BK.gather(1, rank_B.clamp(min=0)[:, None]).squeeze(1).masked_fill(~goes_on_B, -1)
        at_B = torch.where(goes_on_B, found_B + 1, at_B)
        p_BV = torch.where(goes_on_B[:, None], target_probs_BTV[rows_B, at_B], p_BV)
        path.append(found_B)
    path_BD = torch.stack(path, dim=1)
    num_accepted_B = (path_BD >= 0).sum(dim=1)
    next_u_B = next_uniform_BE.gather(1, num_accepted_B[:, None]).squeeze(1)
    return TreeVerdict(num_accepted_B, path_BD, sample_by_inverse_cdf(p_BV, next_u_B))


class _Siblings(NamedTuple):
    """The children of one position of each row. `is_there_BK`: false where a row has fewer, and where it has stopped before."""

    ids_BK: Tensor
    is_there_BK: Tensor
    uniform_BK: Tensor


def _try_in_turn(
    siblings: _Siblings, p_BV: Tensor, q_BC: Tensor, columns_C: Optional[Tensor]
) -> tuple[Tensor, Tensor]:
    """(rank of the child that stands or -1, [B]; what p has become when all fell, [B, V]). columns_C: ids of q's columns, None for all."""
    stood_B = torch.full_like(siblings.ids_BK[:, 0], -1)
    columns_BC = None if columns_C is None else columns_C.expand_as(q_BC)
    column_BK = siblings.ids_BK if columns_C is None else torch.searchsorted(columns_C, siblings.ids_BK)
    for rank in range(siblings.ids_BK.shape[1]):
        ids_B1, u_B1 = siblings.ids_BK[:, rank, None], siblings.uniform_BK[:, rank, None]
        is_tried_B = siblings.is_there_BK[:, rank] & (stood_B < 0)
        column_B1 = column_BK[:, rank, None]
        drawn_from_BC = drawn_from(q_BC, column_B1)
        stands_B = (u_B1 * drawn_from_BC.gather(1, column_B1) < p_BV.gather(1, ids_B1)).squeeze(1)
        stood_B = torch.where(is_tried_B & stands_B, rank, stood_B)
        falls_B = is_tried_B & ~stands_B
        if not p_BV.is_cuda and not bool(falls_B.any()):
            break  # the rest would change nothing; a GPU would have to wait to know
        fallen_BV = residual(p_BV, drawn_from_BC, columns_BC)
        fallen_BV = fallen_BV / fallen_BV.sum(dim=1, keepdim=True)
        p_BV = torch.where(falls_B[:, None], fallen_BV, p_BV)
        q_BC = without(q_BC, column_B1)
    return stood_B, p_BV


def verify_tree_by_argmax(
    tree: Tree | RowTrees, *, draft_ids_BN: Tensor, max_depth_B: Tensor, target_ids_BT: ByPosition
) -> TreeVerdict:
    """The same at temperature 0: the path of nodes that are p's argmax, then the argmax behind them.

    Args:
        draft_ids_BN: siblings differ. target_ids_BT: argmax of p at each position.
    """
    rows_B = torch.arange(draft_ids_BN.shape[0], device=draft_ids_BN.device)
    return _walk(tree, draft_ids_BN, max_depth_B, lambda at_B, num_accepted_B: target_ids_BT[rows_B, at_B])


def verify_tree_by_draws(
    tree: Tree | RowTrees,
    *,
    draft_ids_BN: Tensor,
    max_depth_B: Tensor,
    target_probs_BTV: ByPosition,
    next_uniform_BE: Tensor,
) -> TreeVerdict:
    """For nodes that were chosen without chance: each token is drawn from p itself, and where a node has it, the walk goes on there.

    So the committed tokens follow p whatever the nodes are, if only they do not depend on these draws; with the same uniform
    numbers they are the tokens of plain decoding. A node stands as often as in `verify_tree` with a one-hot q, with probability
    p(x): a point mass takes nothing from p but its own point.

    Args:
        draft_ids_BN: siblings differ. next_uniform_BE: independent uniform numbers in [0, 1).
    """
    rows_B = torch.arange(draft_ids_BN.shape[0], device=draft_ids_BN.device)

    def drawn_at(at_B: Tensor, num_accepted_B: Tensor) -> Tensor:
        return sample_by_inverse_cdf(target_probs_BTV[rows_B, at_B], next_uniform_BE[rows_B, num_accepted_B])

    return _walk(tree, draft_ids_BN, max_depth_B, drawn_at)


def _walk(
    tree: Tree | RowTrees,
    draft_ids_BN: Tensor,
    max_depth_B: Tensor,
    token_at: Callable[[Tensor, Tensor], Tensor],
) -> TreeVerdict:
    """From the root to the child that is the target's token, while there is one. `token_at(position, depth)`: that token."""
    parents_BN = tree.parent_table(draft_ids_BN.device)
    at_B = num_accepted_B = torch.zeros_like(max_depth_B)
    path_BD = max_depth_B.new_full((len(max_depth_B), tree.depth), -1)
    goes_on_B, next_ids_B = num_accepted_B < max_depth_B, token_at(at_B, num_accepted_B)
    for depth in range(tree.depth):
        is_next_BN = (parents_BN == at_B[:, None] - 1) & (draft_ids_BN == next_ids_B[:, None])
        goes_on_B = goes_on_B & is_next_BN.any(dim=1)
        if not goes_on_B.is_cuda and not bool(goes_on_B.any()):
            break  # a GPU would have to wait to know
        node_B = is_next_BN.long().argmax(dim=1)
        path_BD[:, depth] = torch.where(goes_on_B, node_B, -1)
        at_B = torch.where(goes_on_B, node_B + 1, at_B)
        num_accepted_B = num_accepted_B + goes_on_B
        next_ids_B = token_at(at_B, num_accepted_B)
        goes_on_B = goes_on_B & (num_accepted_B < max_depth_B)
    return TreeVerdict(num_accepted_B, path_BD, next_ids_B)


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
        probs_BC = without(probs_BC, column_B1)
        ranking_BC = ranking_BC.scatter(1, column_B1, -torch.inf)
        columns.append(column_B1)
    return torch.cat(columns, dim=1)


def drawn_from(left_BC: Tensor, column_B1: Tensor) -> Tensor:
    """The distribution that a child was drawn from: what is left of q, renormalised, or one-hot where nothing is."""
    mass_B1 = left_BC.sum(dim=1, keepdim=True)
    one_hot_BC = torch.zeros_like(left_BC).scatter_(1, column_B1, 1.0)
    return torch.where(mass_B1 > 0, left_BC / mass_B1, one_hot_BC)


def without(q_BC: Tensor, column_B1: Tensor) -> Tensor:
    """q with a child that was tried taken out; not renormalised."""
    return q_BC.scatter(1, column_B1, 0.0)
