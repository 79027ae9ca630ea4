"""Per-position acceptance of many drafts from hidden states, in chunks: memory is bounded by a chunk's logits.

Shapes: N positions, D hidden, V token ids, K ids that the draft scores (K = V without a shortlist).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eval.acceptance import (
    NO_WARPER,
    Warper,
    acceptance_given_token,
    distribution,
    entropy,
    greedy_agreement,
    greedy_sampler_acceptance,
    overlap,
)
from eval.head import Head

Array = NDArray[np.float32]


class ScoreKey(NamedTuple):
    """What one acceptance figure is of."""

    draft: str
    temperature: float
    sampler: str
    warper: Warper = NO_WARPER


@dataclass
class PositionScores:
    """Of N positions: `acceptance` a_t and `given_token` c_t by key, the target's `entropy` in nats, and each
    draft's `confidence`, its largest probability at temperature 1."""

    acceptance: dict[ScoreKey, Array]
    given_token: dict[ScoreKey, Array]
    entropy: Array
    confidence: dict[str, Array]


@dataclass(frozen=True)
class _Chunk:
    """Logits of one chunk, and its tokens y_t."""

    target_logits_NV: Tensor
    draft_logits_NK: dict[str, Tensor]
    vocab_ids: dict[str, Tensor | None]
    token_ids_N: Tensor


def keys_of(
    drafts: Sequence[str],
    temperatures: Sequence[float],
    samplers: Sequence[str],
    warpers: Sequence[Warper],
) -> Iterator[ScoreKey]:
    """All figures, by draft, temperature, warper and sampler. At temperature 0 no warper changes the argmax."""
    for draft in drafts:
        for temperature in temperatures:
            for warper in warpers if temperature > 0 else (NO_WARPER,):
                for sampler in samplers:
                    yield ScoreKey(draft, temperature, sampler, warper)


@torch.no_grad()
def score_positions(
    target_side: tuple[Head, Tensor],
    draft_sides: Mapping[str, tuple[Head, Tensor]],
    token_ids_N: Tensor,
    *,
    temperatures: Sequence[float],
    samplers: Sequence[str],
    warpers: Sequence[Warper] = (NO_WARPER,),
    chunk_positions: int = 128,
) -> PositionScores:
    """Scores from hidden states [N, D] that predict the tokens `token_ids_N`.

    The target's logits and p are computed once for all drafts.
    """
    parts: list[PositionScores] = []
    vocab_ids = {name: head.vocab_ids for name, (head, _) in draft_sides.items()}
    for start in range(0, len(token_ids_N), chunk_positions):
        at = slice(start, start + chunk_positions)
        target_logits_NV = target_side[0](target_side[1][at])
        chunk = _Chunk(
            target_logits_NV,
            {name: head(hidden_ND[at]) for name, (head, hidden_ND) in draft_sides.items()},
            vocab_ids,
            token_ids_N[at].to(target_logits_NV.device),
        )
        scores = PositionScores(
            {},
            {},
            _numpy(entropy(target_logits_NV)),
            {name: _numpy(_largest_probability(x)) for name, x in chunk.draft_logits_NK.items()},
        )
        for temperature in temperatures:
            if temperature == 0:
                _score_greedy(scores, chunk, samplers)
            for warper in warpers if temperature > 0 else ():
                _score_sampled(scores, chunk, temperature, warper, samplers)
        parts.append(scores)
    return _concatenate(parts)


def _score_greedy(scores: PositionScores, chunk: _Chunk, samplers: Sequence[str]) -> None:
    for name, logits_NK in chunk.draft_logits_NK.items():
        agreement = _numpy(greedy_agreement(chunk.target_logits_NV, logits_NK, chunk.vocab_ids[name]))
        for sampler in samplers:
            key = ScoreKey(name, 0.0, sampler)
            scores.acceptance[key] = scores.given_token[key] = agreement


def _score_sampled(
    scores: PositionScores, chunk: _Chunk, temperature: float, warper: Warper, samplers: Sequence[str]
) -> None:
    p_NV = distribution(chunk.target_logits_NV, temperature, warper)
    p_token_N = p_NV.gather(-1, chunk.token_ids_N[:, None])[:, 0]
    for name, logits_NK in chunk.draft_logits_NK.items():
        ids = chunk.vocab_ids[name]
        if "probabilistic" in samplers:
            key = ScoreKey(name, temperature, "probabilistic", warper)
            q_NK = distribution(logits_NK, temperature, warper)
            p_NK = p_NV if ids is None else p_NV[:, ids]
            scores.acceptance[key] = _numpy(overlap(p_NK, q_NK, is_shortlist=ids is not None))
            q_token_N = probability_of(q_NK, chunk.token_ids_N, ids)
            scores.given_token[key] = _numpy(acceptance_given_token(p_token_N, q_token_N))
        if "greedy" in samplers:
            key = ScoreKey(name, temperature, "greedy", warper)
            scores.acceptance[key] = _numpy(greedy_sampler_acceptance(p_NV, logits_NK, ids))
            draft_ids_N = logits_NK.argmax(dim=-1)
            draft_ids_N = draft_ids_N if ids is None else ids[draft_ids_N]
            scores.given_token[key] = _numpy(draft_ids_N == chunk.token_ids_N)


def probability_of(q_NK: Tensor, token_ids_N: Tensor, vocab_ids: Tensor | None) -> Tensor:
    """q of each position's token, [N]; 0 for an id that is not among the draft's."""
    if vocab_ids is None:
        return q_NK.gather(-1, token_ids_N[:, None])[:, 0]
    columns_N = torch.searchsorted(vocab_ids, token_ids_N).clamp_max(len(vocab_ids) - 1)
    q_N = q_NK.gather(-1, columns_N[:, None])[:, 0]
    return torch.where(vocab_ids[columns_N] == token_ids_N, q_N, torch.zeros_like(q_N))


def _largest_probability(logits_NK: Tensor) -> Tensor:
    return torch.exp(logits_NK.amax(dim=-1) - torch.logsumexp(logits_NK, dim=-1))


def _concatenate(parts: Sequence[PositionScores]) -> PositionScores:
    first = parts[0]
    return PositionScores(
        {key: np.concatenate([part.acceptance[key] for part in parts]) for key in first.acceptance},
        {key: np.concatenate([part.given_token[key] for part in parts]) for key in first.given_token},
        np.concatenate([part.entropy for part in parts]),
        {name: np.concatenate([part.confidence[name] for part in parts]) for name in first.confidence},
    )


def _numpy(values_N: Tensor) -> Array:
    array: Array = values_N.float().cpu().numpy()
    return array
