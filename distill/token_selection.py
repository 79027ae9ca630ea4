"""Token selection: train on the positions where a reference copy of the draft shows that learning is possible.

AdaSPEC (Hu et al. 2025) distils a reference of the draft's own size first. Where the draft's loss is far above the
reference's there is something that such a model can learn; where both are high there is not, and capacity spent there
is lost elsewhere. The choice is made anew at every step, with the draft as it is.

Here it is made within each row, a fixed share of its positions, so that it does not depend on which rows share a batch or
on how a step is split. The kept ones weigh more, by as much as the left-out ones weigh less, so a row's weight in the
step stays its number of supervised tokens.

Legend: T input tokens of a packed batch, S its supervised positions, C positions of one head chunk, R rows.
"""

import torch
from torch import Tensor

from distill.head import ChunkLoss, LMHead


def select_positions(gain_S: Tensor, row_S: Tensor, keep_fraction: float) -> Tensor:
    """Boolean mask, shape S: the ceil(keep_fraction * n) positions of largest gain of each row of n positions.

    `gain_S` is the draft's loss less the reference's; `row_S` numbers the rows from 0. Of equal gains the earlier
    position is kept.
    """
    by_gain_S = torch.argsort(gain_S, descending=True, stable=True)
    order_S = by_gain_S[torch.argsort(row_S[by_gain_S], stable=True)]
    num_R = torch.bincount(row_S)
    start_R = torch.cumsum(num_R, 0) - num_R
    rank_S = torch.empty_like(order_S)
    rank_S[order_S] = torch.arange(len(order_S), device=order_S.device) - start_R[row_S[order_S]]
    # In fp64, or 0.1 * 10 would be 1.0000000149 and round up to 2.
    num_kept_R = torch.ceil(num_R.double() * keep_fraction - 1e-9)
    return rank_S < num_kept_R[row_S]


def selection_weights(gain_S: Tensor, row_S: Tensor, keep_fraction: float) -> Tensor:
    """fp32 weights, shape S: 0 where a position is left out, n / num_kept where it is kept, mean 1 in each row."""
    kept_S = select_positions(gain_S, row_S, keep_fraction)
    num_R = torch.bincount(row_S)
    num_kept_R = torch.bincount(row_S[kept_S], minlength=len(num_R))
    return torch.where(kept_S, (num_R / num_kept_R.clamp(min=1))[row_S], 0.0)


def rows_of_positions(batch: dict[str, Tensor]) -> Tensor:
    """Number of the packed row, from 0, that each supervised position lies in, shape S."""
    row_T = torch.cumsum(batch["position_ids"][0] == 0, 0) - 1
    return row_T[batch["supervised_S"]]


def position_losses(
    hidden_SH: Tensor, head: LMHead, loss_of: ChunkLoss, *, chunk_tokens: int, compute_dtype: torch.dtype
) -> Tensor:
    """`loss_of` at every position, shape S, without gradient; the forward half of `distill.head.chunked_head_loss`."""
    losses: list[Tensor] = []
    with torch.no_grad(), torch.autocast(hidden_SH.device.type, enabled=False):
        for start in range(0, len(hidden_SH), chunk_tokens):
            end = min(start + chunk_tokens, len(hidden_SH))
            logits_CV = head.logits(hidden_SH[start:end], compute_dtype)
            losses.append(loss_of(logits_CV, start, end))
    return torch.cat(losses)


def weighted(loss_of: ChunkLoss, weights_S: Tensor) -> ChunkLoss:
    """The same loss, each position multiplied by its weight."""

    def chunk_loss(logits_CV: Tensor, start: int, end: int) -> Tensor:
        return loss_of(logits_CV, start, end) * weights_S[start:end]

    return chunk_loss
