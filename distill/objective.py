"""The weighted sum of losses that a training run minimises.

Legend: N positions, V draft ids (rows of its possibly trimmed head), K cached ids, B = K + 1 buckets.
"""

import math

import torch
from torch import Tensor

from distill import losses
from distill.config import LossConfig
from distill.topk import draft_buckets, target_buckets


class Objective:
    """Per-position loss of a `LossConfig`, from cached top-k (`topk`) or from the target's full distribution (`full`).

    Both take the draft's raw logits, so that no pass over the vocabulary is made twice, and the target's own tokens as
    rows of the draft's head (-1: the head lacks it).
    """

    def __init__(self, config: LossConfig) -> None:
        self.temperature = config.temperature
        self.weights = {name: weight for name, weight in config.weights.items() if weight > 0}
        self.options: dict[str, dict[str, float]] = {
            "jsd": {"beta": config.jsd_beta},
            "lk_hybrid": {"eta": config.lk_eta},
        }

    def topk(self, ids_NK: Tensor, logp_NK: Tensor, draft_logits_NV: Tensor, token_rows_N: Tensor) -> Tensor:
        """Loss per position, shape N, against the cached log-probabilities (`ids_NK` are head rows or -1)."""
        scores_NV = self._scores(draft_logits_NV)
        if set(self.weights) == {"cross_entropy"}:
            return self._cross_entropy(scores_NV, torch.logsumexp(scores_NV, -1), token_rows_N)
        scores_NB = draft_buckets(ids_NK, scores_NV)
        norm_N = torch.logsumexp(scores_NB, -1)
        num_tail_ids_N1 = scores_NV.shape[-1] - (ids_NK >= 0).sum(-1, keepdim=True)
        target_NB = target_buckets(logp_NK.float(), num_tail_ids_N1, self.temperature)
        floor = {"reverse_kl": {"log_floor": losses.LOG_TAIL_FLOOR}}
        return self._sum(target_NB, scores_NB - norm_N[:, None], scores_NV, norm_N, token_rows_N, floor)

    def full(
        self, target_logits_NV: Tensor, draft_logits_NV: Tensor, token_rows_N: Tensor | None, rows: Tensor | None
    ) -> Tensor:
        """Loss per position, shape N, against a live target. `rows` are the target's ids that the draft's head keeps;
        without it both sides are cut to the ids that they share and renormalised (padded vocabularies). Where no token is
        the target's own (`token_rows_N` is None), cross entropy is its expectation under the target."""
        if rows is None:
            num_shared = min(target_logits_NV.shape[-1], draft_logits_NV.shape[-1])
            target_logits_NV, draft_logits_NV = target_logits_NV[:, :num_shared], draft_logits_NV[:, :num_shared]
            token_rows_N = None if token_rows_N is None else torch.where(token_rows_N < num_shared, token_rows_N, -1)
        target_NV = torch.log_softmax(self._scores(target_logits_NV), -1)
        target_NV = target_NV if rows is None else target_NV[:, rows]
        scores_NV = self._scores(draft_logits_NV)
        norm_N = torch.logsumexp(scores_NV, -1)
        return self._sum(target_NV, scores_NV - norm_N[:, None], scores_NV, norm_N, token_rows_N, {})

    def _scores(self, logits_NV: Tensor) -> Tensor:
        logits_NV = logits_NV.float()
        # A division by 1 would still be a pass over the vocabulary, each way.
        return logits_NV if self.temperature == 1.0 else logits_NV / self.temperature

    def _sum(
        self, target: Tensor, draft: Tensor, scores_NV: Tensor, norm_N: Tensor, token_rows_N: Tensor | None,
        extra: dict[str, dict[str, float]],
    ) -> Tensor:
        total_N = torch.zeros_like(norm_N)
        for name, weight in self.weights.items():
            if name == "cross_entropy" and token_rows_N is not None:
                value_N = self._cross_entropy(scores_NV, norm_N, token_rows_N)
            else:
                value_N = getattr(losses, name)(target, draft, **self.options.get(name, {}), **extra.get(name, {}))
            total_N = total_N + weight * value_N
        return total_N

    def _cross_entropy(self, scores_NV: Tensor, norm_N: Tensor, token_rows_N: Tensor) -> Tensor:
        score_N = scores_NV.gather(-1, token_rows_N.clamp(min=0)[:, None])[:, 0]
        reachable = (token_rows_N >= 0) & (score_N != -math.inf)
        return torch.where(reachable, norm_N - score_N, 0.0)
