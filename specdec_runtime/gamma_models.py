"""What proposals bring and what rounds cost, as running estimates from measured rounds."""

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Optional, TypeVar

from specdec_runtime.scheduler import Row

T = TypeVar("T")


@dataclass
class RoundReport:
    """What a round took and gave.

    `num_wanted`: most proposals that each row could make. `num_drafted`: draft steps. `width`: tokens per row of the target's
    forward.
    """

    rows: Sequence[Row]
    num_wanted: Sequence[int]
    num_proposed: Sequence[int]
    num_accepted: Sequence[int]
    num_drafted: int
    width: int
    draft_ms: float
    verify_ms: float
    overhead_ms: float


class ProposalModel:
    """What proposals bring, from recent rounds: P(position accepted | those before it accepted), whether or not the draft got
    so far, and the share of rounds whose draft did. A position with little data leans on the one before it."""

    DECAY = 0.99  # per round: about the last hundred rounds count
    PRIOR, PRIOR_WEIGHT = 0.5, 2.0
    STALE_WEIGHT = 4.0

    def __init__(self, max_gamma: int) -> None:
        self._reached, self._accepted = [0.0] * max_gamma, [0.0] * max_gamma
        self._num_wanted, self._num_run = [0.0] * max_gamma, [0.0] * max_gamma

    def add(self, report: RoundReport) -> None:
        """Takes in a round with proposals."""
        for counts in (self._reached, self._accepted, self._num_wanted, self._num_run):
            counts[:] = [x * self.DECAY for x in counts]
        for wanted, accepted in zip(report.num_wanted, report.num_accepted, strict=True):
            for i in range(min(wanted, accepted + 1)):
                self._reached[i] += 1
                self._accepted[i] += i < accepted
        for i in range(max(report.num_wanted)):
            self._num_wanted[i] += 1
            self._num_run[i] += i < report.num_drafted

    def soften(self) -> None:
        """Lets old evidence weigh no more than a few rounds, so that a trial can overrule it."""
        for i, reached in enumerate(self._reached):
            scale = min(1.0, self.STALE_WEIGHT / reached) if reached else 1.0
            self._reached[i] *= scale
            self._accepted[i] *= scale

    def expected_tokens(self, gamma: int) -> float:
        """E(gamma), tokens per row and round."""
        expected, chain = 1.0, 1.0
        for rate in self._leaning(self._accepted[:gamma], self._reached[:gamma], self.PRIOR):
            chain *= rate
            expected += chain
        return expected

    def expected_steps(self, gamma: int) -> float:
        """Draft steps of a round that may make gamma of them."""
        return sum(self._leaning(self._num_run[:gamma], self._num_wanted[:gamma], 1.0))

    def _leaning(self, hits: Iterable[float], tries: Iterable[float], previous: float) -> Iterator[float]:
        for num_hits, num_tries in zip(hits, tries, strict=True):
            previous = (num_hits + self.PRIOR_WEIGHT * previous) / (num_tries + self.PRIOR_WEIGHT)
            yield previous


class CostModel:
    """Milliseconds of a round by batch size and gamma: medians of recent measurements, interpolated between widths."""

    WINDOW = 15
    SLOPE = 0.02  # guess for an unmeasured width: this share of a forward per further token, low so that it gets tried

    def __init__(self) -> None:
        self._target_ms: dict[int, dict[int, deque[float]]] = defaultdict(dict)
        self._draft_step_ms: dict[int, deque[float]] = {}
        self._overhead_ms: dict[int, deque[float]] = {}

    def add(self, report: RoundReport) -> None:
        """Takes in a round."""
        size = _bucket(len(report.rows))
        self._target_ms[size].setdefault(report.width, deque(maxlen=self.WINDOW)).append(report.verify_ms)
        if report.num_drafted:
            step_ms = (report.draft_ms + report.overhead_ms) / report.num_drafted
            self._draft_step_ms.setdefault(size, deque(maxlen=self.WINDOW)).append(step_ms)
        else:
            self._overhead_ms.setdefault(size, deque(maxlen=self.WINDOW)).append(report.overhead_ms)

    def num_plain_rounds(self, num_rows: int) -> int:
        """Rounds without proposals that were measured at this batch size."""
        return len(self._overhead_ms.get(_bucket(num_rows), ()))

    def draft_step_ms(self, num_rows: int) -> float:
        """Milliseconds of a draft step with its share of the round's overhead; 0 before anything is known, so that it gets
        measured."""
        return _median(_nearest(self._draft_step_ms, num_rows))

    def round_ms(self, num_rows: int, num_steps: float, width: float) -> Optional[float]:
        """Predicted milliseconds of a round, or None before anything is known."""
        target_ms = self._width_ms(_nearest(self._target_ms, num_rows), width)
        if target_ms is None:
            return None
        if num_steps == 0:
            return target_ms + _median(_nearest(self._overhead_ms, num_rows))
        return target_ms + num_steps * self.draft_step_ms(num_rows)

    def _width_ms(self, by_width: Optional[dict[int, deque[float]]], width: float) -> Optional[float]:
        if not by_width:
            return None
        known = {w: median(values) for w, values in by_width.items()}
        below, above = [w for w in known if w <= width], [w for w in known if w >= width]
        if below and above:
            low, high = max(below), min(above)
            share = (width - low) / (high - low) if high > low else 0.0
            return known[low] + share * (known[high] - known[low])
        nearest = max(below) if below else min(above)
        return known[nearest] * max(0.5, 1 + self.SLOPE * (width - nearest))


def _median(values: Optional[deque[float]]) -> float:
    return median(values) if values else 0.0


def _bucket(num_rows: int) -> int:
    """Batch sizes are pooled by power of two."""
    return 1 << (num_rows - 1).bit_length()


def _nearest(by_size: dict[int, T], num_rows: int) -> Optional[T]:
    """The entry of the closest batch size that has one."""
    if not by_size:
        return None
    size = _bucket(num_rows)
    return by_size[min(by_size, key=lambda known: abs(known.bit_length() - size.bit_length()))]
