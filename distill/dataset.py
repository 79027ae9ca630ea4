"""Corpus rows to packed training batches: a fixed budget of supervised tokens, no padding, no mask by token id.

A row's input is its prompt and its response without the last token; the positions from the prompt's last token on are
supervised, so that every generated token (the first one and a final EOS included, whatever the pad id is) is predicted
exactly once. Rows are laid end to end with `position_ids` that start again at 0, from which Transformers derives the
block-diagonal attention mask.

Legend: T input tokens of a batch, S its supervised positions, K cached ids.
"""

import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from datasets import Dataset
from torch import Tensor

from distill.config import TrainConfig
from distill.topk import remap_ids

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepPlan:
    """Which rows each micro-batch holds, in order; `num_micro` of them in a row make one optimiser step.

    Processes take micro-batches in turn, so number i of n processes has those whose index is i modulo n.
    """

    micro_batches: list[list[int]]
    num_micro: int

    @property
    def num_steps(self) -> int:
        return len(self.micro_batches) // self.num_micro


def plan_epoch(lengths: Sequence[int], *, tokens_per_step: int, num_micro: int, seed: int, epoch: int) -> list[list[int]]:
    """Row indices of each optimiser step of one epoch: every row once, a pure function of (seed, epoch) and the lengths.

    A step closes where its supervised tokens are nearest to `tokens_per_step` and it has at least `num_micro` rows; a
    last step of less than half the budget joins the one before, for a small step has a noisy gradient.
    """
    order = np.random.default_rng([seed, epoch]).permutation(len(lengths))
    steps: list[list[int]] = [[]]
    filled = 0
    for row in order.tolist():
        overshoot = filled + lengths[row] - tokens_per_step
        if len(steps[-1]) >= num_micro and overshoot > tokens_per_step - filled:
            steps.append([])
            filled = 0
        steps[-1].append(row)
        filled += lengths[row]
    if len(steps) > 1 and (len(steps[-1]) < num_micro or 2 * filled < tokens_per_step):
        last = steps.pop()
        steps[-1] += last
    return steps


def plan_steps(lengths: Sequence[int], train: TrainConfig, num_micro: int, num_processes: int = 1) -> StepPlan:
    """The whole run's batches, up to `num_epochs` (which may be fractional) and `max_steps`.

    A step has the same rows for any `num_processes`, which only cut it into more parts; where these are more than its rows,
    some are empty.
    """
    if len(lengths) < num_micro:
        raise ValueError(
            f"train.gradient_accumulation_steps: {num_micro} micro-batches a step need as many training rows, but there "
            f"are {len(lengths)}; lower it or make a larger corpus"
        )
    steps: list[list[int]] = []
    epoch = 0
    while epoch < train.num_epochs and (train.max_steps is None or len(steps) < train.max_steps):
        new = plan_epoch(lengths, tokens_per_step=train.tokens_per_step, num_micro=num_micro, seed=train.seed, epoch=epoch)
        steps += new[: max(1, round(len(new) * min(1.0, train.num_epochs - epoch)))]
        epoch += 1
    steps = steps if train.max_steps is None else steps[: train.max_steps]
    num_parts = num_micro * num_processes
    return StepPlan([part for rows in steps for part in _split_evenly(rows, num_parts)], num_parts)


def _split_evenly(rows: list[int], num_parts: int) -> list[list[int]]:
    bounds = [len(rows) * part // num_parts for part in range(num_parts + 1)]
    return [rows[start:end] for start, end in itertools.pairwise(bounds)]


class PackedDataset(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Micro-batches of a `StepPlan`, built on access from the (memory-mapped) corpus rows.

    Rows that do not fit `max_sequence_tokens` lose the end of their response; a row whose prompt alone does not fit is
    left out. `num_supervised_tokens` counts what one epoch trains on, `num_cut_tokens` what the limit cost.
    `table` maps vocabulary ids to rows of the draft's head, -1 for those it lacks.
    """

    def __init__(
        self, rows: Dataset, train: TrainConfig, table: Tensor, *, with_topk: bool, num_micro: int | None = None,
        num_processes: int = 1,
    ) -> None:
        _require_columns(rows, with_topk)
        self.rows = rows.with_format("arrow")
        self.table = table
        self.with_topk = with_topk
        # Per row, the reference's loss at its supervised positions, for token selection.
        self.reference_losses: Sequence[np.ndarray] | None = None
        lengths = self.rows.select_columns(["prompt_token_ids", "response_token_ids"])[:]
        num_prompt = _lengths(lengths, "prompt_token_ids")
        num_response = _lengths(lengths, "response_token_ids")
        if (num_prompt == 0).any():
            raise ValueError(f"training row {int(np.argmin(num_prompt))} has an empty prompt: nothing predicts its first token")
        # A row of P prompt and R response tokens has P + R - 1 inputs.
        self.num_kept = np.minimum(num_response, train.max_sequence_tokens - num_prompt + 1).clip(min=0)
        self.usable = np.flatnonzero(self.num_kept > 0)
        self.num_supervised_tokens = int(self.num_kept.sum())
        self.num_cut_tokens = int(num_response.sum()) - self.num_supervised_tokens
        self._report_cut(train)
        num_micro = train.gradient_accumulation_steps if num_micro is None else num_micro
        self.plan = plan_steps(self.num_kept[self.usable].tolist(), train, num_micro, num_processes)

    def _report_cut(self, train: TrainConfig) -> None:
        if self.num_supervised_tokens == 0:
            raise ValueError(
                f"train.max_sequence_tokens={train.max_sequence_tokens}: no training row of {len(self.rows)} has a "
                "response token within it; raise it, or check the corpus"
            )
        if self.num_cut_tokens:
            logger.warning(
                "train.max_sequence_tokens=%d cuts %d of %d response tokens", train.max_sequence_tokens,
                self.num_cut_tokens, self.num_cut_tokens + self.num_supervised_tokens,
            )

    def __len__(self) -> int:
        return len(self.plan.micro_batches)

    def num_tokens_of_step(self, step: int) -> int:
        """Supervised tokens of optimiser step `step` (from 0), over all its micro-batches."""
        first = step * self.plan.num_micro
        parts = self.plan.micro_batches[first : first + self.plan.num_micro]
        return int(sum(self.num_kept[self.usable[part]].sum() for part in parts))

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """`input_ids`, `position_ids` (1, T); `supervised_S`, `token_rows_S`; `topk_rows_SK`, `topk_logp_SK` if cached."""
        rows = self.plan.micro_batches[index]
        if rows:
            return self.pack([int(row) for row in self.usable[rows]])
        # The process still has to go through the forward and backward pass with the others.
        first = index - index % self.plan.num_micro
        row = next(part[0] for part in self.plan.micro_batches[first : first + self.plan.num_micro] if part)
        batch = self.pack([int(self.usable[row])])
        return {name: value[:0] if "_S" in name else value for name, value in batch.items()}

    def pack(self, row_indices: Sequence[int]) -> dict[str, Tensor]:
        """One batch of the given rows, end to end."""
        parts = [self._row(row) for row in row_indices]
        starts = np.cumsum([0, *(len(part["input_ids"]) for part in parts[:-1])])
        joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        joined["supervised"] = np.concatenate([start + part["supervised"] for start, part in zip(starts, parts, strict=True)])
        batch = {name: torch.from_numpy(joined[name])[None] for name in ("input_ids", "position_ids")}
        batch["supervised_S"] = torch.from_numpy(joined["supervised"])
        batch["token_rows_S"] = remap_ids(torch.from_numpy(joined["tokens"]), self.table)
        if self.reference_losses is not None:
            batch["reference_loss_S"] = torch.from_numpy(joined["reference_loss"])
        if self.with_topk:
            batch["topk_rows_SK"] = remap_ids(torch.from_numpy(joined["topk_ids"]), self.table)
            batch["topk_logp_SK"] = torch.from_numpy(joined["topk_logp"])
        return batch

    def _row(self, index: int) -> dict[str, np.ndarray]:
        row = self.rows[index]
        num_kept = int(self.num_kept[index])
        prompt = _flat(row, "prompt_token_ids").astype(np.int64)
        tokens = _flat(row, "response_token_ids").astype(np.int64)
        inputs = np.concatenate([prompt, tokens[: num_kept - 1]])
        result = {
            "input_ids": inputs,
            "position_ids": np.arange(len(inputs)),
            "supervised": np.arange(len(prompt) - 1, len(inputs)),
            "tokens": tokens[:num_kept],
        }
        if self.reference_losses is not None:
            result["reference_loss"] = self.reference_losses[index]
        if self.with_topk:
            ids, logp = _flat(row, "topk_ids"), _flat(row, "topk_logprobs")
            num_cached = len(ids) // len(tokens)
            if len(ids) != num_cached * len(tokens) or len(ids) != len(logp):
                raise ValueError(f"training row {index}: {len(ids)} top-k ids for {len(tokens)} response tokens")
            result["topk_ids"] = ids.reshape(len(tokens), num_cached)[:num_kept].astype(np.int64)
            result["topk_logp"] = logp.reshape(len(tokens), num_cached)[:num_kept].astype(np.float32)
        return result


def _require_columns(rows: Dataset, with_topk: bool) -> None:
    needed = ["prompt_token_ids", "response_token_ids", *(["topk_ids", "topk_logprobs"] if with_topk else [])]
    missing = [name for name in needed if name not in rows.column_names]
    if missing:
        hint = "; loss.teacher=online needs no cached top-k" if with_topk and "topk_ids" in missing else ""
        raise ValueError(f"the training rows lack the columns {missing} (they have {rows.column_names}){hint}")


def _lengths(table: pa.Table, column: str) -> np.ndarray:
    lengths: np.ndarray = pc.list_value_length(table.column(column)).combine_chunks().to_numpy(zero_copy_only=False)
    return lengths.astype(np.int64)


def _flat(row: pa.Table, column: str) -> np.ndarray:
    """All numbers of a (possibly nested) list column of a one-row table."""
    values = row.column(column).combine_chunks()
    while isinstance(values, (pa.ListArray, pa.LargeListArray, pa.FixedSizeListArray)):
        values = values.flatten()
    numbers: np.ndarray = values.to_numpy(zero_copy_only=False)
    return numbers
