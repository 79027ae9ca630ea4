"""Teacher forcing: the hidden states that predict each token of many responses, in few passes.

Sequences are right-padded and no attention mask is given: in a causal model a padding token comes after every
real one and cannot change it, and masks by token id would go wrong where pad and EOS are the same token.

Shapes: B rows of a batch, T padded length, N response positions of a batch, D hidden, V token
ids, K shortlisted ids.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec_runtime.limits import eos_ids_of


@dataclass(frozen=True)
class Draft:
    """A draft and, with a trimmed head, the sorted ids [K] that it can propose (FR-Spec, 2502.14856).

    For the benchmark `model` may be `MedusaHeads`, which bring their ids themselves.
    """

    model: PreTrainedModel
    vocab_ids: Tensor | None = None


@dataclass(frozen=True)
class ResponseRow:
    """One held-out response: every id of `response_token_ids` is one measured position.

    `domain`: what the prompt is about, its source where that is not known. `was_cut`: by a limit, not by its end.
    """

    prompt_id: str
    source: str
    prompt_token_ids: list[int]
    response_token_ids: list[int]
    temperature: float
    domain: str = ""
    was_cut: bool = True

    @property
    def num_tokens(self) -> int:
        """Prompt and response together."""
        return len(self.prompt_token_ids) + len(self.response_token_ids)

    def sampled_at(self, temperature: float) -> bool:
        """Whether the response was sampled at this temperature (float32 on disk, hence the tolerance)."""
        return abs(self.temperature - temperature) < 1e-4


def context_length(model: PreTrainedModel) -> int | None:
    """Longest sequence that the model was made for, None when its config does not say."""
    return getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)


def usable_rows(
    rows: Iterable[Mapping[str, Any]],
    target: PreTrainedModel,
    num_token_ids: int,
    drafts: Iterable[PreTrainedModel] = (),
) -> tuple[list[ResponseRow], int]:
    """(corpus rows that fit the context of every model, how many did not fit).

    What follows a response's first EOS of the target is left off; a row without a response is left out and not counted.

    Raises:
        ValueError: an empty prompt, an id outside the vocabulary (another tokenizer), or no row is left.
    """
    eos_ids = set(eos_ids_of(target))
    answered = [row for row in (_response_row(row, eos_ids) for row in rows) if row.response_token_ids]
    limit = min((c for c in map(context_length, (target, *drafts)) if c is not None), default=None)
    kept = [row for row in answered if limit is None or row.num_tokens <= limit]
    for row in kept:
        if max(max(row.prompt_token_ids), max(row.response_token_ids)) >= num_token_ids:
            raise ValueError(
                f"row {row.prompt_id}: has token ids >= {num_token_ids}; it is from another tokenizer"
            )
    if not kept:
        raise ValueError(
            f"no rows to measure on: {len(answered)} non-empty rows, none within the context of {limit} tokens"
        )
    return kept, len(answered) - len(kept)


def _response_row(row: Mapping[str, Any], eos_ids: set[int]) -> ResponseRow:
    prompt = [int(token_id) for token_id in row["prompt_token_ids"]]
    if not prompt:
        raise ValueError(
            f"row {row['prompt_id']}: empty prompt_token_ids; the first response token has no context"
        )
    response = [int(token_id) for token_id in row["response_token_ids"]]
    end = next((i + 1 for i, token_id in enumerate(response) if token_id in eos_ids), len(response))
    source = str(row["source"])
    return ResponseRow(
        str(row["prompt_id"]),
        source,
        prompt,
        response[:end],
        float(row["temperature"]),
        domain=str(row.get("domain") or source),
        was_cut=row.get("finish_reason", "length") == "length" and not eos_ids.intersection(response[end - 1 : end]),
    )


def rows_at_temperature(
    rows: Sequence[ResponseRow], temperature: float, max_rows: int | None = None
) -> list[int]:
    """Indices of the rows that were sampled at this temperature, or of all rows if none was."""
    matching = [i for i, row in enumerate(rows) if row.sampled_at(temperature)]
    return (matching or list(range(len(rows))))[:max_rows]


def first_rows(rows: Sequence[ResponseRow], max_tokens: int | None) -> list[ResponseRow]:
    """The first rows that have at most `max_tokens` response tokens together (None: all rows), at least one row."""
    chosen: list[ResponseRow] = []
    num_tokens = 0
    for row in rows:
        num_tokens += len(row.response_token_ids)
        if chosen and max_tokens is not None and num_tokens > max_tokens:
            break
        chosen.append(row)
    return chosen


def length_batches(rows: Sequence[ResponseRow], batch_tokens: int) -> list[list[int]]:
    """Indices of rows in batches of similar length, of at most `batch_tokens` padded tokens (or one row)."""
    batches: list[list[int]] = []
    for index in sorted(range(len(rows)), key=lambda i: rows[i].num_tokens):
        # Ascending order: the newcomer is the longest, so it sets the padded length.
        if batches and (len(batches[-1]) + 1) * rows[index].num_tokens <= batch_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


def response_hidden_states(model: PreTrainedModel, rows: Sequence[ResponseRow]) -> Tensor:
    """Last hidden states [N, D] that predict each response token, row after row, in the model's dtype."""
    # The last response token predicts nothing that is measured, so it is not fed.
    sequences = [row.prompt_token_ids + row.response_token_ids[:-1] for row in rows]
    ids_BT = torch.zeros(len(rows), max(map(len, sequences)), dtype=torch.long)
    for i, sequence in enumerate(sequences):
        ids_BT[i, : len(sequence)] = torch.tensor(sequence)
    hidden_BTD = cast(Any, model.base_model)(input_ids=ids_BT.to(model.device), use_cache=False)[0]
    spans = [
        (len(row.prompt_token_ids) - 1, len(sequence)) for row, sequence in zip(rows, sequences, strict=True)
    ]
    return torch.cat([hidden_BTD[i, start:end] for i, (start, end) in enumerate(spans)])
