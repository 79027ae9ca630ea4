"""How many tokens to propose: a fixed number, or the one that measurements say is fastest.

The automatic policy maximises expected tokens per second, sum_rows E(gamma) / time(gamma), with
E(gamma) = 1 + sum_{i<=gamma} prod_{j<=i} a_j from measured acceptance per position (i.i.d. acceptance over-predicts)
and time(gamma) = steps(gamma) * T_draft + T(gamma + 1) + overhead from measured rounds. All rows of a batch share one padded
forward, so a row gains nothing from proposing less than the others: the choice is one number for the batch, and rows
differ by their own limits only. A row that is alone also stops where its draft is too unsure for another step to pay.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple, Optional, Protocol, TypeVar

import torch

from specdec_runtime.config import DecoderConfig
from specdec_runtime.scheduler import Row

T = TypeVar("T")


@dataclass
class RoundReport:
    """What a round took and gave. `num_wanted`: most proposals that each row could make; `num_drafted`: draft steps;
    `width`: tokens per row of the target's forward."""

    rows: Sequence[Row]
    num_wanted: Sequence[int]
    num_proposed: Sequence[int]
    num_accepted: Sequence[int]
    num_drafted: int
    width: int
    draft_ms: float
    verify_ms: float
    overhead_ms: float


class Choice(NamedTuple):
    """`gamma` proposals for each row, 0 is a plain step; fewer where the draft's `confidence` is below this."""

    gamma: int
    confidence: float


class GammaPolicy(Protocol):
    """Chooses the proposals of a round, learns from the round."""

    def choose(self, num_rows: int) -> Choice:
        """For the next round."""
        ...

    def observe(self, report: RoundReport) -> None:
        """Takes in a finished round."""
        ...


class FixedGamma:
    """The same number for every row, always."""

    def __init__(self, config: DecoderConfig) -> None:
        self._choice = Choice(config.num_speculative_tokens, config.draft_confidence)

    def choose(self, num_rows: int) -> Choice:
        return self._choice

    def observe(self, report: RoundReport) -> None:
        """A fixed number learns nothing."""


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


class AutoGamma:
    """The number with the best measured tokens per second, from 0 to the configured maximum.

    `stops_early`: set a confidence too, for a row that is alone.

    While 0 is best, acceptance cannot be seen: every so many rounds one token is proposed, and the interval
    doubles with each such trial that changes nothing.
    """

    FIRST_TRIAL_ROUNDS, LAST_TRIAL_ROUNDS = 128, 1024
    NUM_TRIAL_PROPOSALS = (
        4  # a trial goes on for so many, over all rows: their draft caches have to be brought up first
    )
    PLAIN_ROUNDS_PER_CHOICE = 8
    NUM_PLAIN_FIRST = 3  # at every batch size: what plain decoding costs there is measured and not guessed
    MIN_GAIN = 1.01  # a change must promise this much, so that noise does not make the choice flicker,
    MIN_GAIN_OVER_PLAIN = (
        1.03  # and speculation, whose gain may be a matter of noise, this much; it ends when it has none
    )

    def __init__(self, config: DecoderConfig, *, stops_early: bool = True) -> None:
        self.max_gamma, self.stops_early = config.num_speculative_tokens, stops_early
        self.fixed_width, self.least_confidence = config.fixed_width, config.draft_confidence
        self.proposals, self.cost = ProposalModel(self.max_gamma), CostModel()
        self.gamma = min(2, self.max_gamma)
        self._num_plain_rounds, self._trial_interval, self._trials_left = 0, self.FIRST_TRIAL_ROUNDS, 0
        self._has_news = True

    def choose(self, num_rows: int) -> Choice:
        if self.cost.num_plain_rounds(num_rows) < self.NUM_PLAIN_FIRST:
            return Choice(0, 0.0)
        if self._has_news:
            self._update(num_rows)
        gamma = self.gamma
        if gamma == 0 and self.max_gamma:
            if self._trials_left == 0 and self._num_plain_rounds >= self._trial_interval:
                self._trials_left = -(-self.NUM_TRIAL_PROPOSALS // num_rows)
                self.proposals.soften()
                self._trial_interval = min(2 * self._trial_interval, self.LAST_TRIAL_ROUNDS)
                self._num_plain_rounds = 0
            gamma = 1 if self._trials_left else 0
        return Choice(gamma, max(self.least_confidence, self._break_even_confidence(num_rows)))

    def observe(self, report: RoundReport) -> None:
        self.cost.add(report)
        if any(report.num_proposed):
            self.proposals.add(report)
            self._trials_left = max(0, self._trials_left - 1)
        else:
            self._num_plain_rounds += 1
        # Plain rounds tell nothing about the draft: they are not made to pay for a new choice each.
        self._has_news = (
            any(report.num_proposed) or self._num_plain_rounds % self.PLAIN_ROUNDS_PER_CHOICE == 0
        )

    def _update(self, num_rows: int) -> None:
        speeds = []
        for gamma in range(self.max_gamma + 1):
            round_ms = self._round_ms(num_rows, gamma)
            if round_ms is None:
                return
            speeds.append(self.proposals.expected_tokens(gamma) / max(round_ms, 1e-6))
        best = max(range(len(speeds)), key=speeds.__getitem__)
        if self.gamma and speeds[0] >= speeds[self.gamma]:
            self.gamma, self._num_plain_rounds = 0, 0
        elif speeds[best] > (self.MIN_GAIN if self.gamma else self.MIN_GAIN_OVER_PLAIN) * speeds[self.gamma]:
            if self.gamma == 0:
                self._trial_interval = self.FIRST_TRIAL_ROUNDS
            self.gamma = best

    def _round_ms(self, num_rows: int, gamma: int) -> Optional[float]:
        num_steps = self.proposals.expected_steps(gamma)
        return self.cost.round_ms(num_rows, num_steps, self.fixed_width or 1 + num_steps)

    def _break_even_confidence(self, num_rows: int) -> float:
        """Chance that a row's proposals all stand below which a further draft step costs more than it brings: it takes T_draft,
        in which E / time tokens could be had, and brings a token with that chance times the acceptance at one position.

        0 with several rows: the steps are run as long as one of them goes on.
        """
        if not self.stops_early or num_rows > 1 or self.gamma == 0:
            return 0.0
        round_ms = self._round_ms(num_rows, self.gamma)
        if not round_ms:
            return 0.0
        speed = self.proposals.expected_tokens(self.gamma) / round_ms
        one_acceptance = self.proposals.expected_tokens(1) - 1
        return min(1.0, self.cost.draft_step_ms(num_rows) * speed / one_acceptance)


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


def make_gamma_policy(config: DecoderConfig, device: torch.device) -> GammaPolicy:
    """The policy that the config names. A GPU is not made to wait for each step's confidence."""
    if config.gamma == "auto":
        return AutoGamma(config, stops_early=device.type == "cpu")
    return FixedGamma(config)
