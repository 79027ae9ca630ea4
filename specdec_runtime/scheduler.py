"""Rows and slots: who decodes, who waits, and what a row has committed."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Optional

from torch import Tensor

from specdec_runtime.detokenize import Detokenize, StopStringFinder
from specdec_runtime.ngram_index import NgramIndex
from specdec_runtime.request import Logprobs, Output, Request
from specdec_runtime.stats import Stats


@dataclass
class TokenLogprob:
    """Raw target log-probabilities at one generated token."""

    logprob: float
    top_ids: list[int]
    top_logprobs: list[float]


@dataclass
class Row:
    """A request under way: its committed tokens and its counts.

    `rounds`: (output length before, proposed, accepted) of each round; counted up at the end, when it is known where the
    output was cut. `draft_valid`: positions of the draft's cache that hold committed tokens. `ngrams`: of the tokens so far, where
    proposals are looked up in them. `hidden_H`: the target's last hidden state at the position before the last committed token,
    where a drafter wants it.
    """

    index: int
    request: Request
    seed: int
    stop_ids: frozenset[int]
    finder: Optional[StopStringFinder]
    not_speculating: Optional[str] = None
    token_ids: list[int] = field(default_factory=list)
    draft_valid: int = 0
    ngrams: Optional[NgramIndex] = None
    hidden_H: Optional[Tensor] = None
    finish_reason: Optional[str] = None
    token_times_s: list[float] = field(default_factory=list)
    logprobs: Logprobs = field(default_factory=Logprobs)
    rounds: list[tuple[int, int, int]] = field(default_factory=list)
    times: Stats = field(default_factory=Stats)
    num_streamed: int = 0

    def __post_init__(self) -> None:
        self.token_ids = list(self.request.prompt_token_ids)

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[len(self.request.prompt_token_ids) :]

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - len(self.request.prompt_token_ids)

    @property
    def num_remaining(self) -> int:
        return self.request.max_new_tokens - self.num_generated

    def commit(self, block: Sequence[int], logprobs: Sequence[TokenLogprob], now_s: float) -> list[int]:
        """Appends a block up to its first EOS, stop id, stop string or the length cap; returns what was appended."""
        kept = list(block[: self.num_remaining])
        for i, token_id in enumerate(kept):
            if token_id in self.stop_ids:
                kept, self.finish_reason = kept[: i + 1], "stop"
                break
        self.token_ids.extend(kept)
        self.token_times_s.extend([now_s] * len(kept))
        for entry in logprobs[: len(kept)]:
            self.logprobs.token_logprobs.append(entry.logprob)
            self.logprobs.top_ids.append(entry.top_ids)
            self.logprobs.top_logprobs.append(entry.top_logprobs)
        if self.finder is not None:
            num_before_stop = self.finder.add(kept)
            if num_before_stop is not None:
                self._trim(num_before_stop)
                self.finish_reason = "stop"
        if self.finish_reason is None and self.num_remaining == 0:
            self.finish_reason = "length"
        return kept

    def _trim(self, num_tokens: int) -> None:
        del self.token_ids[len(self.request.prompt_token_ids) + num_tokens :]
        del self.token_times_s[num_tokens:]
        self.logprobs.truncate(num_tokens)

    def take_streamable(self) -> list[int]:
        """Tokens that were not handed out yet and that no stop string can take back."""
        num_safe = self.num_generated
        if self.finder is not None and self.finish_reason is None:
            num_safe = min(num_safe, self.finder.num_safe_tokens())
        new = self.output_ids[self.num_streamed : num_safe]
        self.num_streamed += len(new)
        return new

    def output(self, *, detokenize: Optional[Detokenize], lossless: bool) -> Output:
        """The finished row as an `Output`."""
        assert self.finish_reason is not None
        text = self.finder.text if self.finder is not None and self.finder.has_found else None
        if text is None and detokenize is not None:
            text = detokenize(self.output_ids)
        return Output(
            token_ids=self.output_ids,
            finish_reason=self.finish_reason,
            stats=self._stats(),
            logprobs=self.logprobs if self.request.logprobs is not None else None,
            text=text,
            token_times_s=self.token_times_s,
            lossless=lossless,
        )

    def _stats(self) -> Stats:
        """Counts of the tokens that were kept; a round's forward counts even when a stop string took its tokens."""
        stats = Stats(num_prefills=1, num_committed=self.num_generated, not_speculating=self.not_speculating)
        for start, num_proposed, num_accepted in self.rounds:
            num_kept = max(0, self.num_generated - start)
            if num_kept <= num_accepted:
                num_proposed, num_accepted = min(num_proposed, num_kept), num_kept
            stats.add_round(num_proposed=num_proposed, num_accepted=num_accepted)
        stats.add(self.times)
        return stats


class Scheduler:
    """Waiting requests and the rows in the slots; active rows always fill the first slots.

    `rows` is read one row ahead of what the slots hold, so that it may be a stream of any length.
    """

    def __init__(self, rows: Iterable[Row], num_slots: int) -> None:
        self._source, self.active, self.num_slots = iter(rows), list[Row](), num_slots
        self.start_s = time.perf_counter()
        self._next = next(self._source, None)

    @property
    def is_done(self) -> bool:
        return self._next is None and not self.active

    def admit(self) -> list[Row]:
        """Waiting rows for the free slots; they are now in the slots behind the active ones."""
        admitted: list[Row] = []
        while self._next is not None and len(self.active) + len(admitted) < self.num_slots:
            admitted.append(self._next)
            self._next = next(self._source, None)
        self.active.extend(admitted)
        return admitted

    def now_s(self) -> float:
        """Seconds since the call began."""
        return time.perf_counter() - self.start_s

    def retire(self) -> tuple[list[Row], list[tuple[int, int]]]:
        """Takes the finished rows out. Returns them and the moves (source slot, destination slot) that keep the active
        rows in the first slots. No slot is in two moves, so that their order does not matter."""
        finished = [row for row in self.active if row.finish_reason is not None]
        num_left = len(self.active) - len(finished)
        holes = [slot for slot in range(num_left) if self.active[slot].finish_reason is not None]
        behind = range(num_left, len(self.active))
        late = [slot for slot in behind if self.active[slot].finish_reason is None]
        moves = list(zip(late, holes, strict=True))
        for source, destination in moves:
            self.active[destination] = self.active[source]
        del self.active[num_left:]
        for row in finished:  # a list of all rows of a call keeps them until its end
            row.ngrams = row.hidden_H = None
        return finished, moves
