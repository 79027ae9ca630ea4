"""Acceptance over whole responses, teacher-forced; one pass of the target serves any number of drafts.

What is measured at each position is defined in `eval.acceptance`.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from eval.acceptance import NO_WARPER, Warper
from eval.acceptance_table import AcceptanceTable
from eval.config import SAMPLERS
from eval.head import Head, evaluating, resolve_num_token_ids
from eval.position_scores import Array, PositionScores, ScoreKey, keys_of, score_positions
from eval.teacher_forcing import (
    Draft,
    ResponseRow,
    length_batches,
    response_hidden_states,
    rows_at_temperature,
    usable_rows,
)


def teacher_forced_acceptance(
    target: PreTrainedModel,
    drafts: Mapping[str, Draft],
    rows: Iterable[Mapping[str, Any]],
    *,
    temperatures: Sequence[float],
    samplers: Sequence[str] = SAMPLERS,
    warpers: Sequence[Warper] = (NO_WARPER,),
    num_token_ids: int | None = None,
    max_prompts: int | None = None,
    batch_tokens: int = 2048,
    chunk_positions: int = 128,
) -> list[AcceptanceTable]:
    """Acceptance of every draft over held-out rows.

    Args:
        rows: `prompt_id`, `source`, `prompt_token_ids`, `response_token_ids`, `temperature`, and `domain` and
            `finish_reason` where they are known.
        warpers: each gives figures of its own, on both sides, at T > 0.
        num_token_ids: how many ids the tokenizer has (`num_shared_token_ids` proves it); needed when the
            logits of target and drafts differ in width.
        max_prompts: rows per temperature. batch_tokens: padded tokens per forward pass.

    Returns:
        One table per draft, temperature, warper and sampler, nested so. At temperature 0 the samplers' are equal.

    Raises:
        ValueError: no usable rows, an unknown sampler, ids outside the vocabulary, or logits of
            different widths without `num_token_ids`.
    """
    unknown = sorted(set(samplers) - set(SAMPLERS))
    if unknown or not samplers or not temperatures or min(temperatures) < 0:
        raise ValueError(
            f"samplers={list(samplers)} (of {list(SAMPLERS)}), temperatures={list(temperatures)} (>= 0)"
        )
    models = [draft.model for draft in drafts.values()]
    num_ids = resolve_num_token_ids(
        [target, *models], [None, *(draft.vocab_ids for draft in drafts.values())], num_token_ids
    )
    kept, num_skipped = usable_rows(rows, target, num_ids, models)
    selected = {t: rows_at_temperature(kept, t, max_prompts) for t in dict.fromkeys(temperatures)}
    heads = {name: Head(draft.model, num_ids, draft.vocab_ids) for name, draft in drafts.items()}
    target_head, collected = Head(target, num_ids), _Collected()
    for wanted, indices in _by_temperatures(selected):
        for batch in length_batches([kept[i] for i in indices], batch_tokens):
            batch_rows = [kept[indices[i]] for i in batch]
            scores = score_positions(
                (target_head, _hidden(target, batch_rows)),
                {n: (heads[n], _hidden(draft.model, batch_rows)) for n, draft in drafts.items()},
                torch.tensor([i for row in batch_rows for i in row.response_token_ids]),
                temperatures=wanted,
                samplers=samplers,
                warpers=list(dict.fromkeys(warpers)),
                chunk_positions=chunk_positions,
            )
            collected.add(scores, [indices[i] for i in batch], batch_rows)
    keys = keys_of(list(drafts), list(selected), samplers, list(dict.fromkeys(warpers)))
    return [collected.table(key, kept, num_skipped) for key in keys]


class _Collected:
    """Scores by figure and row."""

    def __init__(self) -> None:
        self.acceptance: dict[ScoreKey, dict[int, Array]] = {}
        self.given_token: dict[ScoreKey, dict[int, Array]] = {}
        self.entropy: dict[int, Array] = {}
        self.confidence: dict[str, dict[int, Array]] = {}

    def add(self, scores: PositionScores, indices: Sequence[int], rows: Sequence[ResponseRow]) -> None:
        ends = np.cumsum([len(row.response_token_ids) for row in rows])[:-1]

        def by_row(values_N: Array) -> dict[int, Array]:
            return dict(zip(indices, np.split(values_N, ends), strict=True))

        self.entropy.update(by_row(scores.entropy))
        for name, values_N in scores.confidence.items():
            self.confidence.setdefault(name, {}).update(by_row(values_N))
        for key, values_N in scores.acceptance.items():
            self.acceptance.setdefault(key, {}).update(by_row(values_N))
            self.given_token.setdefault(key, {}).update(by_row(scores.given_token[key]))

    def table(self, key: ScoreKey, rows: Sequence[ResponseRow], num_skipped: int) -> AcceptanceTable:
        """The values of one figure in the rows' original order."""
        order = sorted(self.acceptance[key])
        return AcceptanceTable(
            draft=key.draft,
            temperature=key.temperature,
            sampler=key.sampler,
            warper=key.warper.name,
            prompt_ids=[rows[i].prompt_id for i in order],
            sources=[rows[i].source for i in order],
            domains=[rows[i].domain for i in order],
            values=[self.acceptance[key][i] for i in order],
            given_token=[self.given_token[key][i] for i in order],
            entropies=[self.entropy[i] for i in order],
            confidences=[self.confidence[key.draft][i] for i in order],
            was_cut=[rows[i].was_cut for i in order],
            rows_matched=rows[order[0]].sampled_at(key.temperature),
            num_skipped_rows=num_skipped,
        )


def _hidden(model: PreTrainedModel, rows: Sequence[ResponseRow]) -> Tensor:
    with evaluating(model):
        return response_hidden_states(model, rows)


def _by_temperatures(selected: Mapping[float, Sequence[int]]) -> list[tuple[list[float], list[int]]]:
    """Rows grouped by the temperatures that want them, so that no figure is computed that nobody reads."""
    groups: dict[tuple[float, ...], list[int]] = {}
    for index in sorted(set().union(*selected.values())):
        groups.setdefault(tuple(t for t in selected if index in set(selected[t])), []).append(index)
    return [(list(temperatures), indices) for temperatures, indices in groups.items()]
