"""The learning rate follows the budget."""

import pytest

from distill.schedule import BudgetClock, lr_factor


def test_lr_factor_shape() -> None:
    assert lr_factor(0.05, warmup=0.1, floor=0.2) == pytest.approx(0.5)
    assert lr_factor(0.1, warmup=0.1, floor=0.2) == pytest.approx(1.0)
    assert lr_factor(0.55, warmup=0.1, floor=0.2) == pytest.approx(0.6)
    assert lr_factor(1.0, warmup=0.1, floor=0.2) == pytest.approx(0.2)
    assert lr_factor(1.5, warmup=0.1, floor=0.2) == pytest.approx(0.2)
    assert lr_factor(0.0, warmup=0.0, floor=0.0) == pytest.approx(1.0)


def test_clock_sums_over_resumes(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("distill.schedule.time.monotonic", lambda: now[0])
    clock = BudgetClock(max_minutes=1.0)
    now[0] += 15
    assert clock.fraction() == pytest.approx(0.25)
    clock.resume_at(30.0)
    now[0] += 15
    assert (clock.seconds(), clock.fraction()) == (pytest.approx(45.0), pytest.approx(0.75))
    now[0] += 100
    assert clock.fraction() == 1.0
    assert BudgetClock(None).fraction() == 0.0
