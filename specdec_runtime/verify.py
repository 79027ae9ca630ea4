"""The verification rule: which proposed tokens stand, and what comes after the last of them.

Shape legend: B rows, G proposed positions (gamma), T = G + 1 target positions, V vocabulary, N ids the draft can propose
(N = V, or a shortlist). p is the target's distribution and q the draft's, both after all warpers, both fp32.
"""

from typing import NamedTuple, Optional

import torch
from torch import Tensor


class Verdict(NamedTuple):
    """`num_accepted_B` proposed tokens stand; `next_ids_B` follows them (a correction, or the bonus after a full run)."""

    num_accepted_B: Tensor
    next_ids_B: Tensor


def verify_chain(
    *,
    draft_ids_BG: Tensor,
    num_proposed_B: Tensor,
    target_ids_BT: Optional[Tensor] = None,
    target_probs_BTV: Optional[Tensor] = None,
    draft_probs_BGN: Optional[Tensor] = None,
    draft_vocab_ids_N: Optional[Tensor] = None,
    accept_uniform_BG: Optional[Tensor] = None,
    next_uniform_BT: Optional[Tensor] = None,
    lossy_accept_BG: Optional[Tensor] = None,
) -> Verdict:
    """Speculative sampling (Leviathan et al. 2023, Chen et al. 2023): the committed tokens follow p exactly.

    Proposal d_i stands when all before it stand and u_i q_i(d_i) < p_i(d_i). At the first one that falls, the next token
    is drawn from the residual max(p_i - q_i, 0), renormalised; when none falls, from p at the position after the last
    proposal (the bonus). At temperature 0 p is one-hot and the same rule reads: stands when it is p's argmax.

    Args:
        draft_ids_BG: proposed ids, the first `num_proposed_B` of each row count; G may be 0.
        target_ids_BT: argmax of p when every row is at temperature 0; no probabilities are needed then.
        target_probs_BTV: p at each position; position i follows the i-th proposal.
        draft_probs_BGN: q that the proposals were sampled from; None: they were chosen by argmax, q is one-hot.
        draft_vocab_ids_N: the ids of q's columns; None: all V. q is zero elsewhere.
        accept_uniform_BG, next_uniform_BT: independent uniform numbers in [0, 1).
        lossy_accept_BG: a lossy rule's verdicts in place of the test above; the next token is then drawn from p.
    """
    if target_ids_BT is not None:
        accept_BG = draft_ids_BG == target_ids_BT[:, :-1] if lossy_accept_BG is None else lossy_accept_BG
        num_accepted_B = _leading_accepts(accept_BG, num_proposed_B)
        return Verdict(num_accepted_B, target_ids_BT.gather(1, num_accepted_B[:, None]).squeeze(1))

    assert target_probs_BTV is not None
    assert accept_uniform_BG is not None
    assert next_uniform_BT is not None
    num_rows, num_drafted = draft_ids_BG.shape
    if lossy_accept_BG is not None:
        accept_BG = lossy_accept_BG
    else:
        p_drafted_BG = target_probs_BTV[:, :-1].gather(2, draft_ids_BG[:, :, None]).squeeze(2)
        q_drafted_BG = probs_of(draft_ids_BG, draft_probs_BGN, draft_vocab_ids_N)
        accept_BG = accept_uniform_BG * q_drafted_BG < p_drafted_BG
    num_accepted_B = _leading_accepts(accept_BG, num_proposed_B)

    rows_B = torch.arange(num_rows, device=draft_ids_BG.device)
    next_probs_BV = target_probs_BTV[rows_B, num_accepted_B]
    if num_drafted and lossy_accept_BG is None:
        at_B = num_accepted_B.clamp(max=num_drafted - 1)
        fell_B1 = (num_accepted_B < num_proposed_B)[:, None]
        columns_Bn: Optional[Tensor] = None
        if draft_probs_BGN is None:
            columns_Bn, q_Bn = draft_ids_BG.gather(1, at_B[:, None]), fell_B1.float()
        else:
            q_Bn = draft_probs_BGN[rows_B, at_B] * fell_B1
            if draft_vocab_ids_N is not None:
                columns_Bn = draft_vocab_ids_N.expand_as(q_Bn)
        next_probs_BV = residual(next_probs_BV, q_Bn, columns_Bn)
    next_u_B = next_uniform_BT.gather(1, num_accepted_B[:, None]).squeeze(1)
    return Verdict(num_accepted_B, sample_by_inverse_cdf(next_probs_BV, next_u_B))


def _leading_accepts(accept_BG: Tensor, num_proposed_B: Tensor) -> Tensor:
    """Accepted tokens before the first fall: [T, F, T, T] gives 1."""
    in_use_BG = torch.arange(accept_BG.shape[1], device=accept_BG.device) < num_proposed_B[:, None]
    return (accept_BG & in_use_BG).long().cumprod(dim=1).sum(dim=1)


def probs_of(ids_BG: Tensor, probs_BGN: Optional[Tensor], vocab_ids_N: Optional[Tensor]) -> Tensor:
    """q of the proposals themselves, [B, G]; 1 when q is one-hot."""
    if probs_BGN is None:
        return torch.ones_like(ids_BG, dtype=torch.float32)
    columns_BG = ids_BG if vocab_ids_N is None else torch.searchsorted(vocab_ids_N, ids_BG)
    return probs_BGN.gather(2, columns_BG[:, :, None]).squeeze(2)


def residual(p_BV: Tensor, q_Bn: Tensor, columns_Bn: Optional[Tensor]) -> Tensor:
    """max(p - q, 0), unnormalised. Rounding may leave nothing where p equals q: then p itself is right."""
    left_BV = p_BV - q_Bn if columns_Bn is None else p_BV.scatter_add(1, columns_Bn, -q_Bn)
    left_BV = left_BV.clamp_(min=0.0)
    return torch.where(left_BV.sum(dim=1, keepdim=True) > 0, left_BV, p_BV)


def sample_by_inverse_cdf(weights_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """Draws one id per row in proportion to non-negative, unnormalised weights; never an id of weight 0."""
    # A parallel scan in fp32 need not be monotone, which could let an id of weight 0 through; in fp64 that is out of reach.
    cdf_BV = weights_BV.cumsum(dim=1, dtype=torch.float64 if weights_BV.is_cuda else None)
    total_B1 = cdf_BV[:, -1:]
    # Rounding could lift u * total up to the total, behind the last id that has mass.
    at_B1 = torch.minimum(
        uniform_B[:, None].to(cdf_BV.dtype) * total_B1, torch.nextafter(total_B1, torch.zeros_like(total_B1))
    )
    # Only weights that are no numbers give an id behind the last one: that row's output means nothing, the others' does.
    return torch.searchsorted(cdf_BV, at_B1, right=True).squeeze(1).clamp_(max=weights_BV.shape[1] - 1)
