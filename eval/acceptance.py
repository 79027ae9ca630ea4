"""Acceptance: how much of the target's distribution the draft covers. This page is the definition.

For a position t of a response y that the target wrote to a prompt x, with p = p(. | x, y_<t) of the target
and q = q(. | x, y_<t) of the draft, both in fp32 and after the same warpers:

    temperature 0                     a_t = 1 if argmax p == argmax q else 0      (for both samplers)
    T > 0, sampler `probabilistic`    a_t = sum_v min(p_v, q_v) = 1 - TV(p, q)    (Leviathan et al. 2023)
    T > 0, sampler `greedy`           a_t = p(argmax q)                           (one-hot q, vLLM's default)

    acceptance_rate = sum of a_t over all measured positions / number of measured positions

* Measured positions are every generated response token, the first and the final EOS included, none after EOS.
* It is marginal: the prefix is always the target's own text, so a_t is not conditioned on earlier
  proposals having been accepted in a round. (What a server prints, accepted / proposed tokens, depends on
  gamma and is another figure.)
* The bonus token is not counted: it is drawn from p and nothing was proposed for it.
* Rows are those that were sampled at the temperature being measured, if there are any; otherwise all rows.
* A draft with a shortlist (`vocab_ids`) has q renormalised over those ids and zero elsewhere.
* Padding ids (logits wider than the tokenizer) have no mass on either side.

So acceptance lies in [0, 1], and is exactly 1 when draft and target are the same model.

Shapes: N positions of a chunk, V token ids, K ids that the draft scores (K = V without a
shortlist), P prompts.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from eval.acceptance_table import AcceptanceTable
from eval.config import SAMPLERS
from eval.head import Head, evaluating, resolve_num_token_ids
from eval.teacher_forcing import (
    Draft,
    ResponseRow,
    eos_ids_of,
    length_batches,
    read_rows,
    response_hidden_states,
    rows_at_temperature,
    usable_rows,
)
from specdec_runtime.sampling import warp_logits

Warp = Callable[[Tensor], Tensor]
"""fp32 logits [N, V] that were divided by the temperature -> warped logits, -inf where top-k, top-p or min-p
cut.
"""


def warper(*, top_k: int | None = None, top_p: float = 1.0, min_p: float = 0.0) -> Warp:
    """The runtime's own top-k, top-p and min-p as a function for `teacher_forced_acceptance`."""

    def warp(logits_NV: Tensor) -> Tensor:
        def column(value: float) -> Tensor:
            return torch.tensor([value], device=logits_NV.device)

        return warp_logits(
            logits_NV[None],
            temperature_B=column(1.0),
            top_k_B=column(top_k) if top_k else None,
            top_p_B=column(top_p) if top_p < 1 else None,
            min_p_B=column(min_p) if min_p > 0 else None,
        )[0]

    return warp


def distribution(logits_NV: Tensor, temperature: float, warp: Warp | None = None) -> Tensor:
    """p [N, V] in fp32 at a temperature > 0, or q [N, K] on the draft's columns: the same for both sides."""
    assert temperature > 0
    logits_NV = logits_NV.float() / temperature
    return torch.softmax(logits_NV if warp is None else warp(logits_NV), dim=-1)


def greedy_agreement(
    target_logits_NV: Tensor, draft_logits_NK: Tensor, vocab_ids: Tensor | None = None
) -> Tensor:
    """Temperature 0: 1.0 where both models' most likely ids agree, shape [N]."""
    draft_ids_N = draft_logits_NK.argmax(dim=-1)
    draft_ids_N = draft_ids_N if vocab_ids is None else vocab_ids[draft_ids_N]
    return (target_logits_NV.argmax(dim=-1) == draft_ids_N).float()


def overlap(p_NK: Tensor, q_NK: Tensor, *, is_shortlist: bool = False) -> Tensor:
    """sum_v min(p_v, q_v), shape [N], as 1 - TV, which is exactly 1.0 for equal rows in floating point too.

    With `is_shortlist` the columns are the draft's ids only, and the mass that p has elsewhere
    is distance as well.
    """
    distance_N = (p_NK - q_NK).abs().sum(dim=-1)
    if is_shortlist:
        distance_N = distance_N + (1 - p_NK.sum(dim=-1)).clamp_min(0)
    return (1 - 0.5 * distance_N).clamp(0, 1)


def greedy_sampler_acceptance(
    p_NV: Tensor, draft_logits_NK: Tensor, vocab_ids: Tensor | None = None
) -> Tensor:
    """p(argmax q), shape [N]: the chance that the target's sample is the draft's one proposal."""
    draft_ids_N = draft_logits_NK.argmax(dim=-1)
    draft_ids_N = draft_ids_N if vocab_ids is None else vocab_ids[draft_ids_N]
    return p_NV.gather(-1, draft_ids_N[:, None])[:, 0].clamp(0, 1)


def score_positions(
    target_side: tuple[Head, Tensor],
    draft_sides: Mapping[str, tuple[Head, Tensor]],
    *,
    temperatures: Sequence[float],
    samplers: Sequence[str],
    warp: Warp | None = None,
    chunk_positions: int = 128,
) -> dict[tuple[str, float, str], NDArray[np.float32]]:
    """a_t of N positions by (draft, temperature, sampler), each of shape [N], from hidden states [N, D].

    The heads run on `chunk_positions` positions at a time: memory is bounded by that many rows of V floats,
    and the target's logits and p are computed once for all drafts.
    """
    target_head, target_hidden_ND = target_side
    parts: dict[tuple[str, float, str], list[Tensor]] = {}
    for start in range(0, len(target_hidden_ND), chunk_positions):
        chunk = slice(start, start + chunk_positions)
        target_logits_NV = target_head(target_hidden_ND[chunk])
        logits_of = {name: head(hidden_ND[chunk]) for name, (head, hidden_ND) in draft_sides.items()}
        for temperature in temperatures:
            p_NV = distribution(target_logits_NV, temperature, warp) if temperature > 0 else None
            for name, draft_logits_NK in logits_of.items():
                ids = draft_sides[name][0].vocab_ids
                if p_NV is None:
                    agreement_N = greedy_agreement(target_logits_NV, draft_logits_NK, ids)
                    scores = dict.fromkeys(samplers, agreement_N)
                else:
                    scores = {}
                    if "probabilistic" in samplers:
                        q_NK = distribution(draft_logits_NK, temperature, warp)
                        p_NK = p_NV if ids is None else p_NV[:, ids]
                        scores["probabilistic"] = overlap(p_NK, q_NK, is_shortlist=ids is not None)
                    if "greedy" in samplers:
                        scores["greedy"] = greedy_sampler_acceptance(p_NV, draft_logits_NK, ids)
                for sampler, scores_N in scores.items():
                    parts.setdefault((name, temperature, sampler), []).append(scores_N)
    return {key: torch.cat(pieces).cpu().numpy() for key, pieces in parts.items()}


def teacher_forced_acceptance(
    target: PreTrainedModel,
    drafts: Mapping[str, Draft],
    rows: Iterable[Mapping[str, Any]],
    *,
    temperatures: Sequence[float],
    samplers: Sequence[str] = SAMPLERS,
    num_token_ids: int | None = None,
    warp: Warp | None = None,
    max_prompts: int | None = None,
    batch_tokens: int = 2048,
    chunk_positions: int = 128,
) -> list[AcceptanceTable]:
    """Acceptance of every draft over held-out corpus rows; one pass of the target serves all of them.

    Args:
        num_token_ids: how many ids the tokenizer has (`num_shared_token_ids` proves it); needed when the
            logits of target and drafts differ in width.
        warp: top-k, top-p or min-p on logits / temperature (see `warper`), used on both sides at T > 0.
        max_prompts: rows per temperature. batch_tokens: padded tokens per forward pass.

    Returns:
        One table per draft, temperature and sampler, nested so. At temperature 0 the samplers' are equal.

    Raises:
        ValueError: no usable rows, an unknown sampler, ids outside the vocabulary, or logits of
            different widths without `num_token_ids`.
    """
    unknown = sorted(set(samplers) - set(SAMPLERS))
    if unknown or not samplers or not temperatures or min(temperatures) < 0:
        raise ValueError(
            f"samplers={list(samplers)} (of {list(SAMPLERS)}), temperatures={list(temperatures)} (>= 0)"
        )
    models = [target, *(draft.model for draft in drafts.values())]
    num_ids = resolve_num_token_ids(
        models, [None, *(draft.vocab_ids for draft in drafts.values())], num_token_ids
    )
    kept, num_skipped = usable_rows(read_rows(rows, eos_token_ids=eos_ids_of(target)), models, num_ids)
    selected = {t: rows_at_temperature(kept, t, max_prompts) for t in dict.fromkeys(temperatures)}
    target_head = Head(target, num_ids)
    heads = {name: Head(draft.model, num_ids, draft.vocab_ids) for name, draft in drafts.items()}
    values: dict[tuple[str, float, str], dict[int, NDArray[np.float32]]] = {}
    for wanted, indices in _by_temperatures(selected):
        for batch in length_batches([kept[i] for i in indices], batch_tokens):
            batch_rows = [kept[indices[i]] for i in batch]
            draft_sides = {n: (heads[n], _hidden(draft.model, batch_rows)) for n, draft in drafts.items()}
            with torch.no_grad():
                scores = score_positions(
                    (target_head, _hidden(target, batch_rows)), draft_sides,
                    temperatures=wanted, samplers=samplers, warp=warp, chunk_positions=chunk_positions,
                )  # fmt: skip
            ends = np.cumsum([len(row.response_token_ids) for row in batch_rows])[:-1]
            for key, scores_N in scores.items():
                pieces = np.split(scores_N, ends)
                values.setdefault(key, {}).update(zip([indices[i] for i in batch], pieces, strict=True))
    keys = [(name, t, s) for name in drafts for t in selected for s in samplers]
    return [_table(key, kept, values[key], num_skipped) for key in keys]


def _hidden(model: PreTrainedModel, rows: Sequence[ResponseRow]) -> Tensor:
    with evaluating(model):
        return response_hidden_states(model, rows)


def _by_temperatures(selected: Mapping[float, Sequence[int]]) -> list[tuple[list[float], list[int]]]:
    """Rows grouped by the temperatures that want them, so that no figure is computed that nobody reads."""
    groups: dict[tuple[float, ...], list[int]] = {}
    for index in sorted(set().union(*selected.values())):
        groups.setdefault(tuple(t for t in selected if index in set(selected[t])), []).append(index)
    return [(list(temperatures), indices) for temperatures, indices in groups.items()]


def _table(
    key: tuple[str, float, str],
    rows: Sequence[ResponseRow],
    by_row: Mapping[int, NDArray[np.float32]],
    num_skipped: int,
) -> AcceptanceTable:
    """The values of one figure in the rows' original order."""
    name, temperature, sampler = key
    order = sorted(by_row)
    return AcceptanceTable(
        draft=name,
        temperature=temperature,
        sampler=sampler,
        prompt_ids=[rows[i].prompt_id for i in order],
        sources=[rows[i].source for i in order],
        values=[by_row[i] for i in order],
        rows_matched=rows[order[0]].sampled_at(temperature),
        num_skipped_rows=num_skipped,
    )
