"""How many tokens to propose: a fixed number, or the one that measurements say is fastest.

The automatic policy maximises expected tokens per second, sum_rows E(gamma) / time(gamma), with
E(gamma) = 1 + sum_{i<=gamma} prod_{j<=i} a_j from measured acceptance per position (i.i.d. acceptance over-predicts)
and time(gamma) = gamma * T_draft + T(gamma + 1) + overhead from measured rounds. All rows of a batch share one padded
forward, so a row gains nothing from proposing less than the others: the choice is one number for the batch, and rows
differ by their own limits only.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Optional, Protocol, TypeVar

from specdec_runtime.config import DecoderConfig
from specdec_runtime.scheduler import Row

T = TypeVar("T")


@dataclass
class RoundReport:
    """What a round took and gave. `num_drafted`: draft steps; `width`: tokens per row of the target's forward."""

    rows: Sequence[Row]
    num_proposed: Sequence[int]
    num_accepted: Sequence[int]
    num_drafted: int
    width: int
    draft_ms: float
    verify_ms: float
    overhead_ms: float


class GammaPolicy(Protocol):
    """Chooses proposals per row before a round, learns from the round."""

    def choose(self, rows: Sequence[Row]) -> list[int]:
        """Proposals per row; 0 is a plain step."""
        ...

    def observe(self, report: RoundReport) -> None:
        """Takes in a finished round."""
        ...


class FixedGamma:
    """The same number for every row, always."""

    def __init__(self, gamma: int) -> None:
        self.gamma = gamma

    def choose(self, rows: Sequence[Row]) -> list[int]:
        return [self.gamma] * len(rows)

    def observe(self, report: RoundReport) -> None:
        """A fixed number learns nothing."""


class AcceptanceModel:
    """P(accepted | judged) by position, from recent rounds. A position with little data leans on the one before it."""

    DECAY = 0.99  # per round: about the last hundred rounds count
    PRIOR, PRIOR_WEIGHT = 0.5, 2.0
    STALE_WEIGHT = 4.0

    def __init__(self, max_gamma: int) -> None:
        self._judged, self._accepted = [0.0] * max_gamma, [0.0] * max_gamma

    def add(self, num_proposed: Iterable[int], num_accepted: Iterable[int]) -> None:
        self._judged = [x * self.DECAY for x in self._judged]
        self._accepted = [x * self.DECAY for x in self._accepted]
        for proposed, accepted in zip(num_proposed, num_accepted, strict=True):
            for i in range(min(proposed, accepted + 1)):
                self._judged[i] += 1
                self._accepted[i] += i < accepted

    def soften(self) -> None:
        """Lets old evidence weigh no more than a few rounds, so that a trial can overrule it."""
        for i, judged in enumerate(self._judged):
            scale = min(1.0, self.STALE_WEIGHT / judged) if judged else 1.0
            self._judged[i] *= scale
            self._accepted[i] *= scale

    def expected_tokens(self, gamma: int) -> float:
        """E(gamma), tokens per row and round."""
        expected, chain, previous = 1.0, 1.0, self.PRIOR
        for judged, accepted in zip(self._judged[:gamma], self._accepted[:gamma], strict=True):
            previous = (accepted + self.PRIOR_WEIGHT * previous) / (judged + self.PRIOR_WEIGHT)
            chain *= previous
            expected += chain
        return expected


class CostModel:
    """Milliseconds of a round by batch size and gamma: medians of recent measurements, interpolated between widths."""

    WINDOW = 15
    SLOPE = 0.02  # guess for an unmeasured width: this share of a forward per further token, low so that it gets tried

    def __init__(self) -> None:
        self._target_ms: dict[int, dict[int, deque[float]]] = defaultdict(dict)
        self._draft_step_ms: dict[int, deque[float]] = {}
        self._overhead_ms: dict[int, deque[float]] = {}

    def add(self, report: RoundReport) -> None:
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

    def round_ms(self, num_rows: int, gamma: int, width: int) -> Optional[float]:
        """Predicted milliseconds of a round, or None before anything is known."""
        target_ms = self._width_ms(_nearest(self._target_ms, num_rows), width)
        if target_ms is None:
            return None
        if gamma == 0:
            return target_ms + _median(_nearest(self._overhead_ms, num_rows))
        # Before the first proposal a draft step is taken to be free, so that it gets measured.
        return target_ms + gamma * _median(_nearest(self._draft_step_ms, num_rows))

    def _width_ms(self, by_width: Optional[dict[int, deque[float]]], width: int) -> Optional[float]:
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


class AutoGamma:
    """The number with the best measured tokens per second, from 0 to the configured maximum.

    While 0 is best, acceptance cannot be seen: every so many rounds one token is proposed, and the interval
    doubles with each such trial that changes nothing.
    """

    FIRST_TRIAL_ROUNDS, LAST_TRIAL_ROUNDS = 64, 1024
    NUM_TRIALS_IN_A_ROW = 4
    NUM_PLAIN_FIRST = 3  # at every batch size: what plain decoding costs there is measured and not guessed
    MIN_GAIN = 1.01  # a change must promise this much, so that noise does not make the choice flicker

    def __init__(self, config: DecoderConfig) -> None:
        self.max_gamma = config.num_speculative_tokens
        self.fixed_width = config.fixed_width
        self.acceptance, self.cost = AcceptanceModel(self.max_gamma), CostModel()
        self.gamma = min(2, self.max_gamma)
        self._num_plain_rounds, self._trial_interval, self._trials_left = 0, self.FIRST_TRIAL_ROUNDS, 0

    def choose(self, rows: Sequence[Row]) -> list[int]:
        if self.cost.num_plain_rounds(len(rows)) < self.NUM_PLAIN_FIRST:
            return [0] * len(rows)
        self._update(len(rows))
        gamma = self.gamma
        if gamma == 0 and self.max_gamma:
            if self._trials_left == 0 and self._num_plain_rounds >= self._trial_interval:
                self._trials_left = self.NUM_TRIALS_IN_A_ROW
                self.acceptance.soften()
                self._trial_interval = min(2 * self._trial_interval, self.LAST_TRIAL_ROUNDS)
                self._num_plain_rounds = 0
            gamma = 1 if self._trials_left else 0
        return [gamma] * len(rows)

    def observe(self, report: RoundReport) -> None:
        self.cost.add(report)
        if any(report.num_proposed):
            self.acceptance.add(report.num_proposed, report.num_accepted)
            self._trials_left = max(0, self._trials_left - 1)
        else:
            self._num_plain_rounds += 1

    def _update(self, num_rows: int) -> None:
        speeds = []
        for gamma in range(self.max_gamma + 1):
            round_ms = self.cost.round_ms(num_rows, gamma, self.fixed_width or gamma + 1)
            if round_ms is None:
                return
            speeds.append(self.acceptance.expected_tokens(gamma) / max(round_ms, 1e-6))
        best = max(range(len(speeds)), key=speeds.__getitem__)
        if speeds[best] > self.MIN_GAIN * speeds[self.gamma]:
            if self.gamma == 0:
                self._trial_interval = self.FIRST_TRIAL_ROUNDS
            self.gamma, self._num_plain_rounds = best, 0


def _median(values: Optional[deque[float]]) -> float:
    return median(values) if values else 0.0


def _bucket(num_rows: int) -> int:
    """Batch sizes are pooled by power of two."""
    return 1 << (num_rows - 1).bit_length()


def _nearest(by_size: dict[int, T], num_rows: int) -> Optional[T]:
    """The entry of the closest batch size that has one."""
    size = _bucket(num_rows)
    return (
        by_size[min(by_size, key=lambda known: abs(known.bit_length() - size.bit_length()))]
        if by_size
        else None
    )


def make_gamma_policy(config: DecoderConfig) -> GammaPolicy:
    """The policy that the config names."""
    return AutoGamma(config) if config.gamma == "auto" else FixedGamma(config.num_speculative_tokens)
