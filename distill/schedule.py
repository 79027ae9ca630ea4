"""Budgets: how much of a run is done, and the learning rate that follows from it."""

import math
import time


class BudgetClock:
    """Seconds of training, summed over resumed runs, against `max_minutes` (None: no time budget)."""

    def __init__(self, max_minutes: float | None) -> None:
        self.max_seconds = None if max_minutes is None else 60.0 * max_minutes
        self.seconds_before = 0.0
        self._agreed: float | None = None
        self._started = time.monotonic()

    def resume_at(self, seconds: float) -> None:
        """Count on from an earlier run's seconds."""
        self.seconds_before = seconds
        self._started = time.monotonic()

    def seconds(self) -> float:
        """Seconds so far, evaluations and checkpoints included: what the user waits for."""
        return self.seconds_before + time.monotonic() - self._started

    def agree_on(self, seconds: float) -> None:
        """Go by this time from now on: several processes must have one learning rate, and stop at one step."""
        self._agreed = seconds

    def fraction(self) -> float:
        """Share of the time budget that is used, 0 without one."""
        seconds = self.seconds() if self._agreed is None else self._agreed
        return 0.0 if self.max_seconds is None else min(1.0, seconds / self.max_seconds)


def lr_factor(done: float, *, warmup: float, floor: float) -> float:
    """Multiplier of the peak learning rate after the fraction `done` of the budget.

    Linear from 0 to 1 over `warmup`, then half a cosine down to `floor` at the budget's end.
    """
    if warmup > 0 and done < warmup:
        return done / warmup
    progress = min(1.0, (done - warmup) / (1.0 - warmup)) if warmup < 1 else 1.0
    return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * progress))
