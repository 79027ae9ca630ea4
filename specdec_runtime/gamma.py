"""How many tokens to propose: a fixed number, or the one that measurements say is fastest.

The automatic policy maximises expected tokens per second, sum_rows E(gamma) / time(gamma), with
E(gamma) = 1 + sum_{i<=gamma} prod_{j<=i} a_j from measured acceptance per position (i.i.d. acceptance over-predicts)
and time(gamma) = steps(gamma) * T_draft + T(gamma + 1) + overhead from measured rounds. All rows of a batch share one padded
forward, so a row gains nothing from proposing less than the others: the choice is one number for the batch, and rows
differ by their own limits only. A row that is alone also stops where its draft is too unsure for another step to pay.
"""

from typing import NamedTuple, Optional, Protocol

import torch

from specdec_runtime.config import DecoderConfig
from specdec_runtime.gamma_models import CostModel, ProposalModel, RoundReport

__all__ = ["AutoGamma", "Choice", "FixedGamma", "GammaPolicy", "RoundReport", "make_gamma_policy"]


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


class AutoGamma:
    """The number with the best measured tokens per second, from 0 to the configured maximum.

    `stops_early`: set a confidence too, for a row that is alone.

    While 0 is best, acceptance cannot be seen: every so many rounds one token is proposed, and the interval
    doubles with each such trial that changes nothing.
    """

    FIRST_TRIAL_ROUNDS, LAST_TRIAL_ROUNDS = 128, 1024
    NUM_TRIAL_PROPOSALS = 4  # a trial goes on for so many, over all rows: their draft caches have to be brought up first
    PLAIN_ROUNDS_PER_CHOICE = 8
    NUM_PLAIN_FIRST = 3  # at every batch size: what plain decoding costs there is measured and not guessed
    # A change must promise the first, so that noise does not make the choice flicker, and speculation, whose gain may be a
    # matter of noise, the second over plain decoding; it ends when it has none.
    MIN_GAIN, MIN_GAIN_OVER_PLAIN = 1.01, 1.03

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
        self._has_news = any(report.num_proposed) or self._num_plain_rounds % self.PLAIN_ROUNDS_PER_CHOICE == 0

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


def make_gamma_policy(config: DecoderConfig, device: torch.device) -> GammaPolicy:
    """The policy that the config names. A GPU is not made to wait for each step's confidence."""
    if config.gamma == "auto":
        return AutoGamma(config, stops_early=device.type == "cpu")
    return FixedGamma(config)
