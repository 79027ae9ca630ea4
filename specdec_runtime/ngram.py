"""Proposals without a model: what followed the last time that the text ended like this (prompt lookup decoding, Saxena 2023).

Summaries, edits and code repeat their prompt, and long outputs themselves. The proposals are a function of the committed
tokens, so q is one-hot, and the rule that verifies a draft model's argmax keeps the target's distribution here too.

Shape legend: B rows, G proposed positions.
"""

from collections.abc import Sequence
from typing import Optional

import torch
from torch import Tensor

from specdec_runtime.batch import Batch
from specdec_runtime.forward import ModelRunner
from specdec_runtime.ngram_index import NgramIndex
from specdec_runtime.proposal import Proposal
from specdec_runtime.scheduler import Row
from specdec_runtime.stopwatch import Stopwatch


class NgramDrafter:
    """Looks the last tokens of each row up in its own prompt and output; see `NgramIndex`.

    Each row keeps its own index, so that nothing has to move with its slot and no memory is planned for it.
    """

    def __init__(self, *, min_tokens: int, max_tokens: int) -> None:
        self.min_tokens, self.max_tokens = min_tokens, max_tokens
        self.runner: Optional[ModelRunner] = None
        self.vocab_ids_N: Optional[Tensor] = None
        self.wants_hidden = False

    def catch_up(self, rows: Sequence[Row], wanted: Sequence[int], *, chunk: int) -> None:
        """Nothing: a row that wants proposals brings its index up to date as it looks them up."""

    def propose(
        self,
        batch: Batch,
        wanted: Sequence[int],
        uniform_PBT: Optional[Tensor],
        watch: Stopwatch,
        *,
        confidence: float = 0.0,
    ) -> Optional[Proposal]:
        """Rows without a match propose nothing. Each row proposes as many as it wants; the text knows no `confidence`."""
        with watch.phase("draft"):
            found = [self._look_up(row, num) for row, num in zip(batch.rows, wanted, strict=True)]
            num_columns = max(map(len, found))
            if num_columns == 0:
                return None
            padded = [[*ids, *[0] * (num_columns - len(ids))] for ids in found]
            ids_BG = torch.tensor(padded, device=batch.device)
            return Proposal(ids_BG, batch.column([len(ids) for ids in found]), None)

    def _look_up(self, row: Row, num_tokens: int) -> list[int]:
        if num_tokens == 0:
            return []
        if row.ngrams is None:
            row.ngrams = NgramIndex(self.min_tokens, self.max_tokens)
        return row.ngrams.continuation(row.token_ids, num_tokens)

    def settle(self, row: Row, *, num_accepted: int, num_drafted: int) -> None:
        """Nothing: what was committed is read off the row."""

    def move(self, source: int, destination: int, row: Row) -> None:
        """Nothing: the index is the row's own."""
