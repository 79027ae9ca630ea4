"""The bootstrap against known standard errors, pairing, and bad input."""

import numpy as np
import pytest

from eval.bootstrap import bootstrap_difference, bootstrap_mean, bootstrap_ratio, bootstrap_speedup


def test_mean_interval_matches_the_normal_theory() -> None:
    values = np.random.default_rng(0).normal(3.0, 2.0, size=400)
    interval = bootstrap_mean(values, num_bootstrap=4000)
    half_width = 1.96 * values.std() / np.sqrt(len(values))
    assert interval.value == pytest.approx(values.mean())
    assert interval.low == pytest.approx(values.mean() - half_width, abs=0.02)
    assert interval.high == pytest.approx(values.mean() + half_width, abs=0.02)


def test_interval_covers_the_truth_about_19_times_in_20() -> None:
    rng = np.random.default_rng(1)
    num_covering = 0
    for trial in range(200):
        interval = bootstrap_mean(rng.exponential(1.0, size=60), num_bootstrap=300, seed=trial)
        num_covering += interval.low <= 1.0 <= interval.high
    assert 0.88 <= num_covering / 200 <= 0.99


def test_ratio_is_of_sums_and_not_a_mean_of_ratios() -> None:
    assert bootstrap_ratio([1, 9], [1, 99]).value == pytest.approx(10 / 100)


def test_same_seed_same_interval_and_another_seed_another() -> None:
    numerators, denominators = np.arange(1, 30), np.full(29, 40)
    first = bootstrap_ratio(numerators, denominators, seed=3)
    assert first == bootstrap_ratio(numerators, denominators, seed=3)
    assert first != bootstrap_ratio(numerators, denominators, seed=4)


def test_pairing_removes_the_spread_that_prompts_share() -> None:
    rng = np.random.default_rng(2)
    tokens = np.full(50, 100.0)
    a = rng.uniform(5, 95, size=50)
    difference = bootstrap_difference(a + 1, tokens, a, tokens)
    assert difference.value == pytest.approx(0.01)
    assert difference.high - difference.low < 1e-9
    alone = bootstrap_ratio(a, tokens)
    assert alone.high - alone.low > 0.1


def test_speedup_is_the_ratio_of_rates_on_the_same_prompts() -> None:
    seconds = np.random.default_rng(3).uniform(1, 5, size=20)
    speedup = bootstrap_speedup(tokens=np.full(20, 30), seconds=seconds / 2, baseline_tokens=np.full(20, 30),
                                baseline_seconds=seconds)  # fmt: skip
    assert (speedup.value, speedup.low, speedup.high) == pytest.approx((2.0, 2.0, 2.0))


def test_one_prompt_has_an_interval_of_no_width() -> None:
    interval = bootstrap_ratio([3], [4])
    assert (interval.low, interval.value, interval.high) == (0.75, 0.75, 0.75)


def test_resamples_without_tokens_are_left_out() -> None:
    interval = bootstrap_ratio([0, 2], [0, 4])
    assert (interval.low, interval.value, interval.high) == (0.5, 0.5, 0.5)


@pytest.mark.parametrize(
    ("numerators", "denominators", "message"),
    [([], [], "no prompts"), ([1, 2], [1], "different lengths"), ([0, 0], [0, 0], "zero")],
)
def test_bad_columns_are_refused(numerators: list[int], denominators: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bootstrap_ratio(numerators, denominators)
