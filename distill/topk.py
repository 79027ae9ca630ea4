"""Cached top-k log-probabilities of the target, set against the draft's full distribution.

Legend: N positions, V draft ids, K cached ids, B = K + 1 buckets (the cached ids, then the tail).
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor


class _TailLogSumExp(torch.autograd.Function):
    """log sum of exp over the ids that are not listed, -inf where none is left.

    Subtracting the listed mass from 1 would lose both value and gradient once that mass rounds to 1, so the rest is
    summed by itself. One pass over NV each way: this is the widest work of a training step.
    """

    @staticmethod
    def forward(ctx, scores_NV: Tensor, ids_NK: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        num_ids = scores_NV.shape[-1]
        rest_NV1 = scores_NV.new_empty(scores_NV.shape[0], num_ids + 1)
        rest_NV1[:, :num_ids] = scores_NV
        # The extra column takes the ids that the draft does not have (-1).
        rest_NV1.scatter_(-1, torch.where(ids_NK < 0, num_ids, ids_NK), -math.inf)
        rest_NV1[:, num_ids] = -math.inf
        tail_N = torch.logsumexp(rest_NV1, -1)
        ctx.save_for_backward(rest_NV1, tail_N)
        return tail_N

    @staticmethod
    def backward(ctx, grad_N: Tensor) -> tuple[Tensor, None]:  # type: ignore[no-untyped-def]
        rest_NV1, tail_N = ctx.saved_tensors
        empty_N = tail_N == -math.inf
        grad_NV = (rest_NV1[:, :-1] - tail_N.masked_fill(empty_N, 0.0)[:, None]).exp_()
        return grad_NV.mul_(grad_N.masked_fill(empty_N, 0.0)[:, None]), None


def draft_buckets(ids_NK: Tensor, scores_NV: Tensor) -> Tensor:
    """Scores (logits or log-probabilities) of the listed ids and log-sum-exp of all others, shape N, K + 1.

    An id of -1 is one that the draft does not have: its score is -inf. `log_softmax` over the buckets of raw logits
    equals the buckets of their `log_softmax`, which saves that pass over the vocabulary.
    """
    if ids_NK.numel() and int(ids_NK.max()) >= scores_NV.shape[-1]:
        raise ValueError(
            f"topk_ids holds id {int(ids_NK.max())}, but draft_logp has {scores_NV.shape[-1]} ids: mark ids that the "
            "draft lacks with -1 (distill.topk.remap_ids)"
        )
    listed_NK = scores_NV.gather(-1, ids_NK.clamp(min=0)).masked_fill(ids_NK < 0, -math.inf)
    tail_N: Tensor = _TailLogSumExp.apply(scores_NV, ids_NK)  # type: ignore[no-untyped-call]
    return torch.cat([listed_NK, tail_N[:, None]], -1)


def target_buckets(topk_logp_NK: Tensor, num_tail_ids_N1: Tensor, temperature: float = 1.0) -> Tensor:
    """The K cached log-probabilities and the log of the mass that is left, shape N, K + 1.

    At temperature 1 the tail's mass is exact. At another one it depends on how the mass lies inside the tail, which the
    cache does not hold: it is taken as even over the tail's ids, which gives the tail too little mass below 1 and
    too much above. Rows whose cached mass exceeds 1 by fp16 rounding are scaled back to 1.
    """
    total_N1 = torch.logsumexp(topk_logp_NK, -1, keepdim=True)
    logp_NK = topk_logp_NK - total_N1.clamp(min=0.0)
    log_tail_N1 = torch.log1p(-total_N1.clamp(max=0.0).exp()).masked_fill(num_tail_ids_N1 == 0, -math.inf)
    if temperature == 1.0:
        return torch.cat([logp_NK, log_tail_N1], -1)
    log_even_N1 = num_tail_ids_N1.clamp(min=1).log()
    log_tail_N1 = (log_tail_N1 - log_even_N1) / temperature + log_even_N1
    return torch.log_softmax(torch.cat([logp_NK / temperature, log_tail_N1], -1), -1)


def topk_buckets(
    topk_ids_NK: Tensor, topk_logp_NK: Tensor, draft_logp_NV: Tensor, *, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """(target, draft) log-probabilities over the K cached ids and the tail, both of shape N, K + 1, fp32 or fp64.

    `draft_logp_NV` may be raw logits: the draft's side is normalised here.
    """
    if topk_ids_NK.shape != topk_logp_NK.shape:
        raise ValueError(f"topk_ids has shape {tuple(topk_ids_NK.shape)}, topk_logp {tuple(topk_logp_NK.shape)}")
    dtype = torch.promote_types(torch.float32, draft_logp_NV.dtype)
    draft_NV = draft_logp_NV.to(dtype)
    draft_NV = draft_NV / temperature if temperature != 1.0 else draft_NV
    num_tail_ids_N1 = draft_NV.shape[-1] - (topk_ids_NK >= 0).sum(-1, keepdim=True)
    target_NB = target_buckets(topk_logp_NK.to(dtype), num_tail_ids_N1, temperature)
    return target_NB, torch.log_softmax(draft_buckets(topk_ids_NK, draft_NV), -1)


def remap_table(vocab_ids: Sequence[int] | None, num_ids: int) -> Tensor:
    """LongTensor of `num_ids` entries: the row of each id in a head trimmed to `vocab_ids` (None: a whole one), -1 for the
    ids that it lacks."""
    if vocab_ids is None:
        return torch.arange(num_ids)
    table = torch.full((num_ids,), -1, dtype=torch.long)
    table[torch.as_tensor(vocab_ids, dtype=torch.long)] = torch.arange(len(vocab_ids))
    return table


def remap_ids(ids: Tensor, table: Tensor) -> Tensor:
    """Vocabulary ids as rows of a trimmed head, -1 for those it lacks and for ids beyond the table."""
    known = ids < len(table)
    return torch.where(known, table[torch.where(known, ids, 0)], -1)
