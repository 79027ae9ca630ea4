"""Held-out acceptance that is cheap enough to call many times while a draft trains.

The target runs once, when the object is made. What is kept of it per position is its last hidden state
and, per temperature, the normaliser of p; p itself is recomputed chunk by chunk through the target's
head, so the figure is exact and memory stays at N * D values. With a shortlist only the shortlist's
columns of p are ever computed.

Shapes: N positions of a batch, D hidden, V token ids, K ids that the draft scores.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from eval.acceptance import distribution, greedy_sampler_acceptance, overlap
from eval.config import SAMPLERS
from eval.head import Head, evaluating
from eval.teacher_forcing import (
    ResponseRow,
    first_rows,
    length_batches,
    response_hidden_states,
    rows_at_temperature,
    usable_rows,
)


@dataclass(frozen=True)
class _TargetSide:
    """One batch: its rows, and what the target said about them at one temperature.

    argmax [N]; at a temperature > 0 also hidden [N, D] and, with a shortlist, log_normaliser [N].
    """

    temperature: float
    rows: list[ResponseRow]
    argmax: Tensor
    hidden: Tensor | None
    log_normaliser: Tensor | None


class HeldOutAcceptance:
    """`acceptance_rate` of drafts on fixed rows (definitions in `eval.acceptance`); call it with a draft.

    Args:
        rows: corpus rows; the first ones of each temperature are used.
        max_tokens: response tokens to measure on, shared equally among the temperatures.
        temperatures: the call returns the mean over them; `rates` returns each.
        vocab_ids: the shortlist that the drafts' heads are, or will be, trimmed to.
        num_token_ids: how many ids the tokenizer has; by default as many as the target's head scores.

    The target may be freed afterwards: only its head's weights are referred to.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        rows: Iterable[Mapping[str, Any]],
        *,
        temperatures: Sequence[float] = (0.0, 1.0),
        sampler: str = "probabilistic",
        vocab_ids: Sequence[int] | Tensor | None = None,
        num_token_ids: int | None = None,
        max_tokens: int = 5000,
        batch_tokens: int = 2048,
        chunk_positions: int = 128,
    ) -> None:
        if sampler not in SAMPLERS or not temperatures or min(temperatures) < 0:
            raise ValueError(
                f"sampler={sampler!r} (of {list(SAMPLERS)}), temperatures={list(temperatures)} (>= 0)"
            )
        self.sampler = sampler
        self.temperatures = list(dict.fromkeys(temperatures))
        self._chunk_positions = chunk_positions
        self._vocab_ids = None if vocab_ids is None else torch.as_tensor(vocab_ids, dtype=torch.long)
        head = Head(target, num_token_ids or target.get_output_embeddings().weight.shape[0])
        self.num_token_ids = head.weight.shape[0]
        self._p_head = head if self._vocab_ids is None else Head(target, self.num_token_ids, self._vocab_ids)
        kept, _ = usable_rows(rows, target, self.num_token_ids)
        self._batches: list[_TargetSide] = []
        share = max_tokens // len(self.temperatures)
        for temperature in self.temperatures:
            chosen = first_rows([kept[i] for i in rows_at_temperature(kept, temperature)], share)
            for batch in length_batches(chosen, batch_tokens):
                self._batches.append(self._target_side(target, head, temperature, [chosen[i] for i in batch]))

    @property
    def num_positions(self) -> int:
        """Measured positions, all temperatures together."""
        return sum(len(batch.argmax) for batch in self._batches)

    def __call__(self, draft: PreTrainedModel) -> float:
        """Mean acceptance_rate over the temperatures."""
        rates = self.rates(draft)
        return sum(rates.values()) / len(rates)

    def rates(self, draft: PreTrainedModel) -> dict[float, float]:
        """acceptance_rate by temperature. The draft's training flag and gradients are left as they were."""
        head = Head(draft, self.num_token_ids, self._vocab_ids)
        sums = dict.fromkeys(self.temperatures, 0.0)
        counts = dict.fromkeys(self.temperatures, 0)
        with evaluating(draft):
            for batch in self._batches:
                hidden_ND = response_hidden_states(draft, batch.rows)
                for start in range(0, len(hidden_ND), self._chunk_positions):
                    chunk = slice(start, start + self._chunk_positions)
                    scores_N = self._scores(batch, chunk, head(hidden_ND[chunk]))
                    sums[batch.temperature] += float(scores_N.sum(dtype=torch.float64))
                    counts[batch.temperature] += len(scores_N)
        return {t: sums[t] / counts[t] for t in self.temperatures}

    def _scores(self, batch: _TargetSide, chunk: slice, draft_logits_NK: Tensor) -> Tensor:
        """a_t of the chunk's positions, [N]."""
        ids = None if self._vocab_ids is None else self._vocab_ids.to(draft_logits_NK.device)
        if batch.hidden is None:
            draft_ids_N = draft_logits_NK.argmax(dim=-1)
            return (batch.argmax[chunk] == (draft_ids_N if ids is None else ids[draft_ids_N])).float()
        target_logits_NK = self._p_head(batch.hidden[chunk])
        if batch.log_normaliser is None:
            p_NK = distribution(target_logits_NK, batch.temperature)
        else:
            p_NK = torch.exp(target_logits_NK / batch.temperature - batch.log_normaliser[chunk, None])
        if self.sampler == "greedy":
            return greedy_sampler_acceptance(p_NK, draft_logits_NK)
        q_NK = distribution(draft_logits_NK, batch.temperature)
        return overlap(p_NK, q_NK, is_shortlist=ids is not None)

    def _target_side(
        self, target: PreTrainedModel, head: Head, temperature: float, rows: list[ResponseRow]
    ) -> _TargetSide:
        with evaluating(target):
            hidden_ND = response_hidden_states(target, rows)
            argmax, normaliser = [], []
            for piece_ND in torch.split(hidden_ND, self._chunk_positions):
                logits_NV = head(piece_ND)
                argmax.append(logits_NV.argmax(dim=-1))
                if temperature > 0 and self._vocab_ids is not None:
                    normaliser.append(torch.logsumexp(logits_NV / temperature, dim=-1))
            return _TargetSide(
                temperature=temperature,
                rows=rows,
                argmax=torch.cat(argmax),
                hidden=hidden_ND if temperature > 0 else None,
                log_normaliser=torch.cat(normaliser) if normaliser else None,
            )
