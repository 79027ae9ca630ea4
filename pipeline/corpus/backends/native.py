"""This project's own engine, without a draft: continuous batching in this process."""

import math
from collections.abc import Iterable, Iterator
from itertools import islice

import numpy as np
from transformers import PreTrainedModel

from pipeline.corpus.backends.base import NON_FINITE, FinishedRow, Options, misfit
from pipeline.corpus.rows import Row
from specdec_runtime import DecoderConfig, Output, Request, SpeculativeDecoder

#: Rows that are ordered together, in batches.
_WINDOW_BATCHES = 4


class NativeCorpusBackend:
    """`SpeculativeDecoder` on rows.

    Prompts are fed one by one and every decode step has `batch_size` rows, so that a row's numbers are rounded alike
    in whatever company it is decoded: a resumed run, or a second worker, gives the same greedy tokens in bf16 too.

    Args:
        max_length: tokens of the longest prompt and response together.
    """

    name = "native"

    def __init__(self, model: PreTrainedModel, *, batch_size: int, max_length: int) -> None:
        self.model = model
        self.decoder = SpeculativeDecoder(
            model,
            None,
            DecoderConfig(
                num_speculative_tokens=0,
                max_batch_size=batch_size,
                max_length=max_length,
                width_invariant=True,
                verify_width=1,
            ),
        )
        self.batch_size = batch_size
        self.max_length = min(max_length, self.decoder.target.context)

    def generate(self, rows: Iterable[Row], options: Options) -> Iterator[FinishedRow]:
        """See `CorpusBackend.generate`."""
        under_way: dict[int, Row] = {}
        refused: list[FinishedRow] = []

        def requests() -> Iterator[Request]:
            vocab_size = self.decoder.target.vocab_size
            for row in _greedy_first(rows, _WINDOW_BATCHES * self.batch_size):
                reason = misfit(row, context=self.max_length, vocab_size=vocab_size)
                if reason is not None:
                    refused.append(FinishedRow(row, failure=reason))
                    continue
                under_way[requests_made[0]] = row
                requests_made[0] += 1
                yield _request(row, options)

        requests_made = [0]
        prefix = options.shared_prefix[: self.max_length - 1]
        for event in self.decoder.stream(requests(), shared_prefix=prefix):
            yield from _taken(refused)
            options.report(len(event.token_ids))
            if event.output is not None:
                yield _finished(under_way.pop(event.request_index), event.output, options.topk)
        yield from _taken(refused)

    def close(self) -> None:
        """Nothing to give back but memory, which goes with the object."""


def _greedy_first(rows: Iterable[Row], num_rows: int) -> Iterator[Row]:
    """Puts the greedy ones of so many rows before the others: a batch without sampled rows needs no probabilities."""
    rows = iter(rows)
    while window := list(islice(rows, num_rows)):
        yield from sorted(window, key=lambda row: row.temperature > 0)


def _taken(rows: list[FinishedRow]) -> list[FinishedRow]:
    taken = rows[:]
    rows.clear()
    return taken


def _request(row: Row, options: Options) -> Request:
    return Request(
        prompt_token_ids=row.prompt_token_ids,
        max_new_tokens=row.max_new_tokens,
        temperature=row.temperature,
        top_p=row.top_p,
        seed=row.seed,
        stop_token_ids=sorted(options.stop_token_ids),
        ignore_eos=True,  # the caller's ids are all that end a text
        logprobs=options.topk,
    )


def _finished(row: Row, output: Output, topk: int) -> FinishedRow:
    logprobs = output.logprobs
    assert logprobs is not None
    if not all(math.isfinite(value) for value in logprobs.token_logprobs):
        return FinishedRow(row, failure=NON_FINITE)
    finished = FinishedRow(row, output.token_ids, output.finish_reason)
    if topk:
        finished.topk_ids = np.array(logprobs.top_ids, dtype=np.int32)
        finished.topk_logprobs = np.array(logprobs.top_logprobs, dtype=np.float32).astype(np.float16)
    return finished
