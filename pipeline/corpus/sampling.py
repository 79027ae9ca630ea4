"""Sampling of rows that do not depend on each other: each has its own seed and its own uniform numbers.

Shape legend: B rows, V vocabulary, C candidates.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_TOP_P_CANDIDATES = 1024


def sample(logits_BV: Tensor, uniforms_B: Tensor, *, top_p: float = 1.0) -> Tensor:
    """Inverse-CDF sampling from softmax(logits) cut to its nucleus (Holtzman et al. 2020): token ids [B].

    A row's token depends on its own logits and its own uniform number only. The nucleus is the smallest set of most
    likely tokens whose mass reaches `top_p`; a token without probability is never chosen.
    """
    probs_BV = logits_BV.softmax(dim=-1)
    if top_p >= 1.0:
        return _invert(probs_BV, uniforms_B)
    num_candidates = min(_TOP_P_CANDIDATES, probs_BV.shape[-1])
    top_BC, ids_BC = probs_BV.topk(num_candidates, dim=-1)
    if bool((top_BC.sum(dim=-1) < top_p).any()):
        top_BC, ids_BC = probs_BV.sort(dim=-1, descending=True)
    outside_BC = top_BC.cumsum(dim=-1) - top_BC >= top_p
    return ids_BC.gather(1, _invert(top_BC.masked_fill(outside_BC, 0.0), uniforms_B)[:, None])[:, 0]


def _invert(weights_BC: Tensor, uniforms_B: Tensor) -> Tensor:
    cumulative_BC = weights_BC.double().cumsum(dim=-1)
    total_B1 = cumulative_BC[:, -1:]
    # Strictly below the total, so that rounding never passes the last token that has any weight.
    points_B1 = torch.minimum(
        uniforms_B[:, None].double() * total_B1, torch.nextafter(total_B1, torch.zeros_like(total_B1))
    )
    return torch.searchsorted(cumulative_BC, points_B1, right=True)[:, 0].clamp_(max=weights_BC.shape[-1] - 1)


def uniforms(seeds: Sequence[int], num_steps: int) -> Tensor:
    """One uniform number per row and step, float64 [B, num_steps], each row's from its own seed."""
    return torch.from_numpy(
        np.stack([np.random.Generator(np.random.Philox(seed)).random(num_steps) for seed in seeds])
    )
