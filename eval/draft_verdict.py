"""Does this draft pay, and at which gamma? From its tokens per forward and the step times of both models.

No acceptance is assumed to be i.i.d. here: tau by gamma comes from text (`eval.rounds`) or from decoding.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from eval.bootstrap import Interval
from eval.theory import StepTimes

PAYS, PAYS_WHEN_SHORT, DOES_NOT_PAY = "pays", "pays only at", "does not pay"


@dataclass(frozen=True)
class DraftVerdict:
    """`speedups`: predicted, by gamma. `best_gamma` is 0 where plain decoding is fastest; `best_speedup` is then 1."""

    speedups: dict[int, float]
    paying_gammas: list[int]
    best_gamma: int
    best_speedup: float

    @property
    def pays(self) -> bool:
        """Whether any gamma is faster than plain decoding."""
        return bool(self.paying_gammas)

    @property
    def meaning(self) -> str:
        """`pays`, `pays only at gamma 1, 2` or `does not pay`."""
        if not self.pays:
            return DOES_NOT_PAY
        if len(self.paying_gammas) == len(self.speedups):
            return PAYS
        return f"{PAYS_WHEN_SHORT} gamma {', '.join(map(str, self.paying_gammas))}"


@dataclass(frozen=True)
class Confirmation:
    """Gammas of a verdict by what the clock says: it agrees, the interval holds 1 and so leaves it open, or it disagrees."""

    confirmed: list[int]
    open: list[int]
    refuted: list[int]

    @property
    def meaning(self) -> str:
        """As in `confirmed at gamma 1, 3; open at gamma 2`; empty without measurements."""
        parts = [("confirmed", self.confirmed), ("open", self.open), ("refuted", self.refuted)]
        return "; ".join(f"{word} at gamma {', '.join(map(str, gammas))}" for word, gammas in parts if gammas)


def shows_gain(low: float, high: float) -> bool:
    """Whether the whole interval of a speedup is above 1. One prompt, or one batch, gives an interval of no width: it shows nothing."""
    return 1 < low < high


def confirm(verdict: DraftVerdict, measured: Mapping[int, Interval]) -> Confirmation:
    """Hold a verdict against measured speedups, by gamma, over plain decoding; one prompt's, without a width, leave it open."""
    result = Confirmation([], [], [])
    for gamma, speedup in sorted(measured.items()):
        if speedup.low <= 1 <= speedup.high or speedup.low == speedup.high:
            result.open.append(gamma)
        elif (speedup.value > 1) == (gamma in verdict.paying_gammas):
            result.confirmed.append(gamma)
        else:
            result.refuted.append(gamma)
    return result


def judge_draft(tau_by_gamma: Mapping[int, float], times: StepTimes) -> DraftVerdict:
    """The verdict over all gammas for which both tau and T(gamma+1) are known.

    Raises:
        ValueError: there is none.
    """
    speedups = {
        gamma: times.speedup(tau=tau, gamma=gamma)
        for gamma, tau in sorted(tau_by_gamma.items())
        if 1 <= gamma <= times.max_gamma
    }
    if not speedups:
        raise ValueError(
            f"tau is known for gammas {sorted(tau_by_gamma)}, T(gamma+1) for 1 to {times.max_gamma}: none has both"
        )
    best = max(speedups, key=lambda gamma: (speedups[gamma], -gamma))
    if speedups[best] <= 1:
        return DraftVerdict(speedups, [], 0, 1.0)
    return DraftVerdict(speedups, [g for g, s in speedups.items() if s > 1], best, speedups[best])
