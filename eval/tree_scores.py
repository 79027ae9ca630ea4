"""How often the target's token is the draft's first guess, its second, ..., at each depth of a round: what trees are chosen by.

Teacher-forced on responses that the target wrote, so that the path up to a guess is right. With p and q as in `eval.acceptance`,
the guess of rank j stands, all before it having fallen, with probability

    temperature 0                     1 if it is argmax p, else 0; the guesses are the draft's likeliest ids, in that order
    T > 0, sampler `greedy`           p(guess); the guesses are the same
    T > 0, sampler `probabilistic`    the rule of `specdec_runtime.verify_tree`, for guesses that are drawn from q without replacement,
                                      once per position

Shapes: N positions of a chunk, T of a response, D depths, K guesses for a position, V token ids, C ids that the draft scores.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from eval.acceptance import distribution
from eval.head import Head, evaluating, resolve_num_token_ids
from eval.teacher_forcing import (
    Draft,
    ResponseRow,
    first_rows,
    length_batches,
    response_hidden_states,
    rows_at_temperature,
    usable_rows,
)
from specdec_runtime.medusa_heads import MedusaHeads
from specdec_runtime.verify import residual
from specdec_runtime.verify_tree import drawn_from, sample_without_replacement, without

Array = NDArray[np.float32]
#: Positions whose logits are in memory at once.
CHUNK = 128


@dataclass(frozen=True)
class GuessScores:
    """`stands[i]` [T, D, K] of response i: entry [s, d, j] is the probability that, in a round that starts with token s, the guess of
    rank j for token s + d stands and none before it; 0 where nothing is proposed, behind the end."""

    temperature: float
    sampler: str
    stands: list[Array]

    @property
    def num_positions(self) -> int:
        """Where a round could start: every token but the first, which comes from the prompt."""
        return sum(len(stands) - 1 for stands in self.stands)

    def by_rank(self) -> list[list[float]]:
        """P(the guess of rank j stands) at each depth, given that the tokens before it are among the guesses: [D][K]."""
        starts_SDK = np.concatenate([stands[1:] for stands in self.stands]).astype(np.float64)
        reached_S, rates = np.ones(len(starts_SDK)), []
        for depth in range(starts_SDK.shape[1]):
            at_SK = starts_SDK[:, depth]
            rates.append([float(x) for x in (reached_S @ at_SK) / max(reached_S.sum(), 1e-9)])
            reached_S = reached_S * at_SK.sum(axis=1)
        return rates


def guess_scores(
    target: PreTrainedModel,
    draft: Draft,
    rows: Iterable[Mapping[str, Any]],
    *,
    temperature: float,
    sampler: str,
    max_depth: int,
    num_guesses: int,
    num_token_ids: int | None = None,
    max_tokens: int | None = None,
    batch_tokens: int = 2048,
    seed: int = 0,
) -> GuessScores:
    """Scores of a draft model's guesses, or of Medusa heads', which see only what was there when the round began.

    Args:
        rows: as for `teacher_forced_acceptance`. max_tokens: response tokens to measure on, None for all.
        max_depth: D; of heads there are no more than that. num_guesses: K.

    Raises:
        ValueError: no usable rows.
    """
    heads = draft.model if isinstance(draft.model, MedusaHeads) else None
    models = [target] if heads is not None else [target, draft.model]
    num_ids = resolve_num_token_ids(models, [None, draft.vocab_ids][: len(models)], num_token_ids)
    kept, _ = usable_rows(rows, target, num_ids, models[1:])
    chosen = first_rows([kept[i] for i in rows_at_temperature(kept, temperature)], max_tokens)
    generator = torch.Generator().manual_seed(seed)
    scorer = _Scorer(Head(target, num_ids), temperature, sampler, num_guesses, generator)
    own_head = None if heads is not None else Head(draft.model, num_ids, draft.vocab_ids)
    result: dict[int, Array] = {}
    for batch in length_batches(chosen, batch_tokens):
        batch_rows = [chosen[i] for i in batch]
        lengths = [len(row.response_token_ids) for row in batch_rows]
        hidden = [_hidden(model, batch_rows).split_with_sizes(lengths) for model in models]
        for k, (index, row) in enumerate(zip(batch, batch_rows, strict=True)):
            # No proposal is made for the token at a limit.
            target_TD = hidden[0][k][: lengths[k] - 1 if row.was_cut else lengths[k]]
            if heads is not None:
                stands = scorer.of_heads(heads, target_TD, min(max_depth, heads.shape.num_heads))
            else:
                assert own_head is not None
                stands = scorer.of_model(own_head, hidden[1][k], target_TD, max_depth)
            result[index] = nn.functional.pad(stands, (0, 0, 0, 0, 0, lengths[k] - len(stands))).numpy()
    return GuessScores(temperature, sampler, [result[i] for i in sorted(result)])


@dataclass(frozen=True)
class _Scorer:
    """Scores of one response from the states [T, D] that predict its tokens; `target_head` on one of the target's."""

    target_head: Head
    temperature: float
    sampler: str
    num_guesses: int
    generator: torch.Generator

    def of_model(self, own_head: Head, own_TD: Tensor, target_TD: Tensor, max_depth: int) -> Tensor:
        """[T, D, K]: a draft model that has read the path guesses at each depth as it does at the first."""
        scores = self._scores(target_TD[1:], own_TD[1:], own_head, own_head.vocab_ids)
        stands = torch.zeros(len(target_TD), max_depth, self.num_guesses)
        for depth in range(min(max_depth, len(scores))):
            stands[1 : 1 + len(scores) - depth, depth] = scores[depth:]
        return stands

    def of_heads(self, heads: MedusaHeads, target_TD: Tensor, max_depth: int) -> Tensor:
        """[T, D, K]: head d guesses token s + d from the state that predicted token s - 1, the last committed one."""
        stands = torch.zeros(len(target_TD), max_depth, self.num_guesses)
        for depth in range(max_depth):
            head = nn.Sequential(heads.blocks[depth], heads.rows[depth])
            scores = self._scores(target_TD[1 + depth :], target_TD.to(heads.dtype), head, heads.vocab_ids_N)
            stands[1 : 1 + len(scores), depth] = scores
        return stands

    @torch.no_grad()
    def _scores(
        self, target_ND: Tensor, own_ND: Tensor, own_head: Callable[[Tensor], Tensor], vocab_ids: Tensor | None
    ) -> Tensor:
        parts = [torch.zeros(0, self.num_guesses)]
        for start in range(0, len(target_ND), CHUNK):
            end = min(start + CHUNK, len(target_ND))
            logits = self.target_head(target_ND[start:end]), own_head(own_ND[start:end]).float()
            parts.append(
                guesses_that_stand(*logits, vocab_ids, self.temperature, self.sampler, self.num_guesses, self.generator)
            )
        return torch.cat(parts)


def _hidden(model: PreTrainedModel, rows: Sequence[ResponseRow]) -> Tensor:
    with evaluating(model):
        return response_hidden_states(model, rows)


@torch.no_grad()
def guesses_that_stand(
    target_logits_NV: Tensor,
    draft_logits_NC: Tensor,
    vocab_ids_C: Tensor | None,
    temperature: float,
    sampler: str,
    num_guesses: int,
    generator: torch.Generator,
) -> Tensor:
    """[N, K]: the probability that each guess stands and none before it; fp32 logits, see the head of the file."""
    num_guesses_here = min(num_guesses, draft_logits_NC.shape[1])
    columns_NK = draft_logits_NC.topk(num_guesses_here, dim=1).indices
    ids_NK = columns_NK if vocab_ids_C is None else vocab_ids_C[columns_NK]
    if temperature == 0:
        stands_NK = (ids_NK == target_logits_NV.argmax(dim=1, keepdim=True)).float()
    else:
        p_NV = distribution(target_logits_NV, temperature)
        if sampler == "greedy":
            stands_NK = p_NV.gather(1, ids_NK)
        else:
            q_NC = distribution(draft_logits_NC, temperature)
            u_NK = torch.rand(len(q_NC), num_guesses_here, generator=generator).to(q_NC.device)
            drawn_NK = sample_without_replacement(q_NC, u_NK, draft_logits_NC)
            stands_NK = _by_rejection(p_NV, q_NC, drawn_NK, vocab_ids_C)
    return nn.functional.pad(stands_NK, (0, num_guesses - num_guesses_here)).cpu()


def _by_rejection(p_NV: Tensor, q_NC: Tensor, drawn_NK: Tensor, vocab_ids_C: Tensor | None) -> Tensor:
    """Sibling after sibling as in `verify_tree`, with the probability of each verdict in place of a verdict."""
    columns_NC = None if vocab_ids_C is None else vocab_ids_C.expand_as(q_NC)
    ids_NK = drawn_NK if vocab_ids_C is None else vocab_ids_C[drawn_NK]
    goes_on_N, stands = torch.ones(len(p_NV), device=p_NV.device), []
    for column_N, ids_N in zip(drawn_NK.unbind(dim=1), ids_NK.unbind(dim=1), strict=True):
        column_N1, ids_N1 = column_N[:, None], ids_N[:, None]
        drawn_from_NC = drawn_from(q_NC, column_N1)
        chance_N = (p_NV.gather(1, ids_N1) / drawn_from_NC.gather(1, column_N1)).squeeze(1).clamp(max=1.0)
        stands.append(goes_on_N * chance_N)
        goes_on_N = goes_on_N * (1 - chance_N)
        left_NV = residual(p_NV, drawn_from_NC, columns_NC)
        p_NV = left_NV / left_NV.sum(dim=1, keepdim=True)
        q_NC = without(q_NC, column_N1)
    return torch.stack(stands, dim=1)
