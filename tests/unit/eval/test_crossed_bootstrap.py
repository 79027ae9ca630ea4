"""Intervals over training seeds and prompts: against loops, against the textbook variance, and where they must be exact."""

import numpy as np
import pytest

from eval.bootstrap import bootstrap_ratio
from eval.crossed_bootstrap import crossed_bootstrap, crossed_difference


def brute_force(sums_SP: np.ndarray, counts_P: np.ndarray, num_bootstrap: int, seed: int) -> tuple[float, float]:
    """The definition, one resample after the other, with the module's own draws."""
    num_seeds, num_prompts = sums_SP.shape
    rng = np.random.default_rng(seed)
    prompts_RP = rng.multinomial(num_prompts, np.full(num_prompts, 1 / num_prompts), size=num_bootstrap)
    seeds_RS = rng.multinomial(num_seeds, np.full(num_seeds, 1 / num_seeds), size=num_bootstrap)
    figures = []
    for times_P, times_S in zip(prompts_RP, seeds_RS, strict=True):
        total = sum(times * count for times, count in zip(times_P, counts_P, strict=True))
        of_seed = [sum(t * s for t, s in zip(times_P, row, strict=True)) / total for row in sums_SP]
        mean = sum(of_seed) / num_seeds
        drawn = sum(times * value for times, value in zip(times_S, of_seed, strict=True)) / num_seeds
        figures.append(mean + (num_seeds / (num_seeds - 1)) ** 0.5 * (drawn - mean))
    low, high = np.quantile(figures, [0.025, 0.975])
    return float(low), float(high)


def test_equals_the_definition_written_out() -> None:
    rng = np.random.default_rng(0)
    counts_P = rng.integers(1, 40, size=9).astype(float)
    sums_SP = rng.random((3, 9)) * counts_P
    interval = crossed_bootstrap(sums_SP, counts_P, num_bootstrap=60, seed=5)
    assert interval.value == pytest.approx(np.mean([row.sum() / counts_P.sum() for row in sums_SP]))
    assert (interval.low, interval.high) == pytest.approx(brute_force(sums_SP, counts_P, 60, 5))


def test_one_seed_is_the_bootstrap_over_prompts() -> None:
    rng = np.random.default_rng(1)
    counts_P = rng.integers(5, 40, size=30).astype(float)
    sums_P = rng.random(30) * counts_P
    ours = crossed_bootstrap(sums_P[None], counts_P, num_bootstrap=500, seed=3)
    theirs = bootstrap_ratio(sums_P, counts_P, num_bootstrap=500, seed=3)
    assert (ours.value, ours.low, ours.high) == pytest.approx((theirs.value, theirs.low, theirs.high))


@pytest.mark.parametrize("num_seeds", [3, 8])
def test_width_from_seeds_alone_is_the_textbook_standard_error(num_seeds: int) -> None:
    """Equal prompts leave only the seeds: variance s^2 / S, which plain resampling of S seeds would underestimate."""
    values_S = np.random.default_rng(2).normal(0.5, 0.1, size=num_seeds)
    sums_SP = np.repeat(values_S[:, None], 4, axis=1) * 10
    counts_P = np.full(4, 10.0)
    # The half width at 68.27% is one standard error where the resampled means are about normal.
    interval = crossed_bootstrap(sums_SP, counts_P, num_bootstrap=40000, confidence=0.6827)
    standard_error = values_S.std(ddof=1) / num_seeds**0.5
    assert (interval.high - interval.low) / 2 == pytest.approx(standard_error, rel=0.2)


def test_a_constant_difference_has_no_width_however_much_both_sides_vary() -> None:
    """Pairing removes what the seeds and the prompts have in common."""
    rng = np.random.default_rng(3)
    counts_P = np.full(20, 10.0)
    b_SP = rng.random((3, 20)) * 8
    interval = crossed_difference(b_SP + 1.0, b_SP, counts_P)
    assert (interval.value, interval.low, interval.high) == pytest.approx((0.1, 0.1, 0.1))
    unpaired = crossed_bootstrap(b_SP, counts_P)
    assert unpaired.high - unpaired.low > 0.05


def test_noise_of_seeds_and_of_prompts_both_widen_it() -> None:
    rng = np.random.default_rng(4)
    counts_P = np.full(50, 10.0)
    prompts_P, seeds_S = rng.normal(0, 1, 50), rng.normal(0, 0.5, 12)
    still = np.full((12, 50), 5.0)
    widths = []
    for sums_SP in (still, still + seeds_S[:, None], still + prompts_P, still + seeds_S[:, None] + prompts_P):
        interval = crossed_bootstrap(sums_SP, counts_P, seed=1)
        widths.append(interval.high - interval.low)
    assert widths[0] == pytest.approx(0, abs=1e-9)
    assert widths[3] > max(widths[1], widths[2]) > min(widths[1], widths[2]) > 0.01


@pytest.mark.parametrize(
    ("sums", "counts"), [(np.ones((0, 2)), np.ones(2)), (np.ones((2, 2)), np.ones(3)), (np.ones((1, 2)), np.zeros(2))]
)
def test_what_cannot_be_measured_is_refused(sums: np.ndarray, counts: np.ndarray) -> None:
    with pytest.raises(ValueError, match="seeds, prompts"):
        crossed_bootstrap(sums, counts)
    with pytest.raises(ValueError, match="same seeds and prompts"):
        crossed_difference(np.ones((2, 3)), np.ones((3, 3)), np.ones(3))
