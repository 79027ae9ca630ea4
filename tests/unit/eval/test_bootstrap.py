"""The bootstrap against known standard errors, pairing, and bad input."""

from dataclasses import replace

import numpy as np
import pytest

from eval.acceptance_summary import Resampling, rate_row
from eval.acceptance_table import AcceptanceTable, paired_difference
from eval.bootstrap import bootstrap_difference, bootstrap_mean, bootstrap_ratio, bootstrap_speedup
from eval.rounds import expected_rounds
from pipeline.prompt_sums import prompt_sums


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


def test_answers_of_one_prompt_are_resampled_together() -> None:
    """Each prompt's answers, written ten times down, are no more evidence than once."""
    rng = np.random.default_rng(4)
    sums, counts, names = rng.uniform(0, 10, size=30), np.full(30, 10.0), [f"p{i}" for i in range(30)]
    once = bootstrap_ratio(sums, counts)
    again = bootstrap_ratio(np.repeat(sums, 10), np.repeat(counts, 10), prompt_ids=[n for n in names for _ in range(10)])
    assert (again.value, again.low, again.high) == pytest.approx((once.value, once.low, once.high))
    apart = bootstrap_ratio(np.repeat(sums, 10), np.repeat(counts, 10))
    assert apart.high - apart.low < 0.5 * (again.high - again.low)


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


def test_several_answers_to_a_prompt_are_one_prompt_of_an_acceptance_table() -> None:
    values = [np.array([0.5, float(i % 3 == 0), i / 20], dtype=np.float32) for i in range(20)]
    names = [f"p{i}" for i in range(20)]
    once = AcceptanceTable("d", 1.0, "probabilistic", names, ["s"] * 20, values, given_token=values)
    again = replace(
        once, prompt_ids=[n for n in names for _ in range(4)], sources=["s"] * 80, values=[v for v in values for _ in range(4)],
        given_token=[v for v in values for _ in range(4)],
    )  # fmt: skip
    worse = replace(again, draft="e", values=[v / 2 for v in again.values])
    for of_once, of_again in (
        (once.rate(), again.rate()),
        (once.by_domain()["s"], again.by_domain()["s"]),
        (paired_difference(once, replace(once, values=[v / 2 for v in values])), paired_difference(again, worse)),
        (expected_rounds(once, 2).block_efficiency(), expected_rounds(again, 2).block_efficiency()),
        (expected_rounds(once, 2).judged_acceptance(), expected_rounds(again, 2).judged_acceptance()),
    ):
        assert (of_again.value, of_again.low, of_again.high) == pytest.approx((of_once.value, of_once.low, of_once.high))
    assert rate_row(again, Resampling(10))["num_prompts"] == 20
    assert prompt_sums(again)["counts"] == [12] * 20 and prompt_sums(again)["prompt_ids"] == names
