"""How often the target says what Medusa's heads say, head by head, on held-out responses.

Head k at position t is held against the target at t + k, given the response's own tokens between, which the head has not seen.
The target runs once, when the object is made; of each position its last hidden state is kept.

Shapes: N positions of a batch, D hidden, V token ids, K ids that the heads score, P prompts.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from eval.acceptance import distribution, overlap
from eval.acceptance_summary import Resampling
from eval.bootstrap import bootstrap_ratio
from eval.head import Head, evaluating
from eval.teacher_forcing import (
    ResponseRow,
    first_rows,
    length_batches,
    response_hidden_states,
    rows_at_temperature,
    usable_rows,
)
from specdec_runtime.medusa_heads import MedusaHeads

MEASURES = ("top1", "top5", "acceptance_rate")


@dataclass
class HeadTable:
    """Sums of one head at one temperature, by prompt.

    `top1`, `top5`: positions where the target's most likely token is the head's, or among its five most likely ones.
    `acceptance_rate`: the mass that is accepted, sum_v min(p_v, q_v); at temperature 0 the same as `top1`.
    """

    head: int
    temperature: float
    counts: dict[str, int] = field(default_factory=dict)
    sums: dict[str, dict[str, float]] = field(default_factory=lambda: {name: {} for name in MEASURES})

    def add(self, prompt_id: str, scores: Mapping[str, Tensor]) -> None:
        """Scores of some positions of a prompt's response, each [N]."""
        self.counts[prompt_id] = self.counts.get(prompt_id, 0) + len(scores["top1"])
        for name, values_N in scores.items():
            sums = self.sums[name]
            sums[prompt_id] = sums.get(prompt_id, 0.0) + float(values_N.sum(dtype=torch.float64))

    def rate(self, name: str) -> float:
        """Mean over positions."""
        return sum(self.sums[name].values()) / max(1, sum(self.counts.values()))

    def row(self, resampling: Resampling) -> dict[str, Any]:
        """Each measure with its 95% interval over prompts."""
        counts = list(self.counts.values())
        return {
            "head": self.head,
            "temperature": self.temperature,
            **{
                name: bootstrap_ratio(
                    list(self.sums[name].values()), counts, num_bootstrap=resampling.num_bootstrap, seed=resampling.seed
                ).as_dict()
                for name in MEASURES
            },
            "num_positions": sum(counts),
            "num_prompts": len(counts),
        }


@dataclass(frozen=True)
class _Side:
    """What the target said about a row: hidden states [N, D] and most likely ids [N]."""

    prompt_id: str
    hidden_ND: Tensor
    argmax_N: Tensor


class HeadAcceptance:
    """Acceptance of Medusa heads on fixed rows; called with heads, the mean of `top1` over heads and temperatures.

    Args:
        rows: corpus rows; those of each temperature, or all where none was sampled at it.
        max_tokens: response tokens to measure on, shared equally among the temperatures; None for all.

    Raises:
        ValueError: no rows that fit the target's context, or rows of another tokenizer.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        rows: Iterable[Mapping[str, Any]],
        *,
        temperatures: Sequence[float] = (0.0, 1.0),
        max_tokens: int | None = None,
        batch_tokens: int = 2048,
        chunk_positions: int = 128,
    ) -> None:
        self._chunk_positions = chunk_positions
        self._head = Head(target, target.get_output_embeddings().weight.shape[0])
        num_ids = self._head.weight.shape[0]
        kept, _ = usable_rows(rows, target, num_ids)
        self._sides: dict[float, list[_Side]] = {}
        for temperature in dict.fromkeys(temperatures):
            chosen = [kept[i] for i in rows_at_temperature(kept, temperature)]
            share = None if max_tokens is None else max_tokens // len(temperatures)
            self._sides[temperature] = list(self._target_sides(target, first_rows(chosen, share), batch_tokens))

    def __call__(self, heads: MedusaHeads) -> float:
        tables = self.tables(heads, with_mass=False)
        return sum(table.rate("top1") for table in tables) / len(tables)

    def tables(self, heads: MedusaHeads, *, with_mass: bool = True) -> list[HeadTable]:
        """One table per head and temperature. Without `with_mass`, `acceptance_rate` is left at `top1`."""
        tables = []
        was_training = heads.training
        heads.eval()
        with torch.no_grad():
            for temperature, sides in self._sides.items():
                for index in range(heads.shape.num_heads):
                    table = HeadTable(index + 1, temperature)
                    for side in sides:
                        for scores in self._scores(heads, index, side, temperature if with_mass else 0.0):
                            table.add(side.prompt_id, scores)
                    tables.append(table)
        heads.train(was_training)
        return tables

    def _scores(
        self, heads: MedusaHeads, index: int, side: _Side, temperature: float
    ) -> Iterator[dict[str, Tensor]]:
        num_positions = len(side.argmax_N) - index - 1
        blocks, rows = heads.blocks[index], heads.rows[index]
        assert isinstance(rows, nn.Linear)
        is_shortlist = heads.shape.num_ids < heads.shape.vocab_size
        for start in range(0, num_positions, self._chunk_positions):
            end = min(start + self._chunk_positions, num_positions)
            logits_NK = rows(blocks(side.hidden_ND[start:end].to(heads.dtype))).float()
            wanted_N1 = side.argmax_N[start + index + 1 : end + index + 1, None]
            top_N5 = heads.vocab_ids_N[logits_NK.topk(min(5, logits_NK.shape[1]), dim=1).indices]
            top1_N = (top_N5[:, :1] == wanted_N1).squeeze(1).float()
            mass_N = top1_N
            if temperature > 0:
                target_NV = self._head(side.hidden_ND[start + index + 1 : end + index + 1])
                p_NV = distribution(target_NV, temperature)
                p_NK = p_NV[:, heads.vocab_ids_N] if is_shortlist else p_NV
                mass_N = overlap(p_NK, distribution(logits_NK, temperature), is_shortlist=is_shortlist)
            yield {"top1": top1_N, "top5": (top_N5 == wanted_N1).any(dim=1).float(), "acceptance_rate": mass_N}

    def _target_sides(
        self, target: PreTrainedModel, rows: Sequence[ResponseRow], batch_tokens: int
    ) -> Iterator[_Side]:
        with evaluating(target):
            for batch in length_batches(rows, batch_tokens):
                chosen = [rows[i] for i in batch]
                hidden_ND = response_hidden_states(target, chosen)
                pieces = hidden_ND.split_with_sizes([len(row.response_token_ids) for row in chosen])
                for row, piece_ND in zip(chosen, pieces, strict=True):
                    starts = range(0, len(piece_ND), self._chunk_positions)
                    chunks = (piece_ND[start : start + self._chunk_positions] for start in starts)
                    argmax = [self._head(x_ND).argmax(dim=-1) for x_ND in chunks]
                    yield _Side(row.prompt_id, piece_ND, torch.cat(argmax))
