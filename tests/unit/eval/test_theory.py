"""Formulas against Monte Carlo and brute force."""

import numpy as np
import pytest

from eval.theory import (
    StepTimes,
    best_gamma,
    break_even_acceptance,
    expected_tokens_from_positions,
    expected_tokens_iid,
    max_paying_draft_ms,
    predicted_speedup,
    speedup_iid,
)

TIMES = StepTimes(
    draft_ms=2.0, target_ms=(10.0, 10.5, 11.0, 12.0, 13.0, 14.5, 16.0, 18.0, 20.0), overhead_ms=0.5
)


def simulate_rounds(conditional: np.ndarray, num_rounds: int, seed: int) -> np.ndarray:
    """Committed tokens per round when proposal i is accepted with its own probability; [num_rounds]."""
    accepted = np.random.default_rng(seed).random((num_rounds, len(conditional))) < conditional
    return 1 + np.cumprod(accepted, axis=1).sum(axis=1)


@pytest.mark.parametrize(("alpha", "gamma"), [(0.0, 3), (0.43, 1), (0.7, 4), (0.95, 8)])
def test_iid_expectation_matches_a_simulation(alpha: float, gamma: int) -> None:
    tokens = simulate_rounds(np.full(gamma, alpha), 200_000, seed=0)
    assert expected_tokens_iid(alpha, gamma) == pytest.approx(
        tokens.mean(), abs=5 * tokens.std() / 400 + 1e-9
    )


@pytest.mark.parametrize(("alpha", "gamma"), [(0.3, 1), (0.813, 5), (0.99, 7)])
def test_iid_expectation_is_the_published_closed_form(alpha: float, gamma: int) -> None:
    assert expected_tokens_iid(alpha, gamma) == pytest.approx((1 - alpha ** (gamma + 1)) / (1 - alpha))


def test_certain_acceptance_commits_gamma_plus_one() -> None:
    assert expected_tokens_iid(1.0, 6) == 7


def test_measured_positions_match_a_simulation() -> None:
    conditional = np.array([0.6, 0.75, 0.8, 0.5])
    tokens = simulate_rounds(conditional, 200_000, seed=1)
    cumulative = np.cumprod(conditional).tolist()
    assert expected_tokens_from_positions(cumulative) == pytest.approx(tokens.mean(), abs=0.015)
    assert expected_tokens_from_positions(cumulative, gamma=2) == pytest.approx(1 + 0.6 + 0.6 * 0.75)


def test_iid_over_predicts_when_acceptance_is_autocorrelated() -> None:
    """Rounds that are all good or all bad have a mean acceptance of .5, which misleads the formula."""
    assert expected_tokens_from_positions([0.5, 0.5, 0.5]) > expected_tokens_iid(0.5, 3)
    assert expected_tokens_from_positions([0.5, 0.1, 0.05]) < expected_tokens_iid(0.5, 3)


def test_predicted_speedup_matches_a_simulated_clock() -> None:
    gamma, alpha = 3, 0.6
    tokens = simulate_rounds(np.full(gamma, alpha), 100_000, seed=2)
    clock_ms = len(tokens) * (gamma * TIMES.draft_ms + TIMES.target_ms[gamma] + TIMES.overhead_ms)
    plain_ms = tokens.sum() * TIMES.target_ms[0]
    assert speedup_iid(alpha, gamma, TIMES) == pytest.approx(plain_ms / clock_ms, rel=0.01)


def test_prefill_is_paid_by_both_sides() -> None:
    shared = {
        "tau": 2.0,
        "gamma": 1,
        "draft_ms": 1.0,
        "target_ms": 10.0,
        "verify_ms": 11.0,
        "overhead_ms": 1.0,
    }
    # 21 tokens: the first from the prefill, 20 plain steps against 10 rounds of 13 ms.
    assert predicted_speedup(**shared, prefill_ms=50.0, num_tokens=21) == pytest.approx(
        (50 + 200) / (50 + 130)
    )
    assert predicted_speedup(**shared) == pytest.approx(20 / 13)
    assert predicted_speedup(**shared, prefill_ms=50.0, num_tokens=1) == 1.0


@pytest.mark.parametrize("gamma", [1, 3, 5, 8])
def test_break_even_is_where_a_scan_crosses_one(gamma: int) -> None:
    alphas = np.linspace(0, 1, 10_001)
    speedups = np.array([speedup_iid(float(alpha), gamma, TIMES) for alpha in alphas])
    assert break_even_acceptance(gamma, TIMES) == pytest.approx(alphas[np.argmax(speedups >= 1)], abs=1.1e-4)


def test_break_even_says_that_a_good_looking_acceptance_does_not_pay() -> None:
    """Soup 303, 843: alpha .813 was sold as good where the break-even at k=5 was .832."""
    times = StepTimes(draft_ms=5.94, target_ms=(10.0, 10.0, 10.0, 10.0, 10.0, 10.0))
    break_even = break_even_acceptance(5, times)
    assert break_even is not None
    assert break_even == pytest.approx(0.832, abs=0.002)
    assert speedup_iid(0.813, 5, times) < 1
    gamma, speedup = best_gamma(0.813, times)
    assert gamma < 5
    assert speedup > 1


def test_no_break_even_where_even_a_perfect_draft_is_slower() -> None:
    slow = StepTimes(draft_ms=20.0, target_ms=(10.0, 11.0, 12.0))
    assert break_even_acceptance(1, slow) is None
    assert best_gamma(1.0, slow) == (0, 1.0)
    assert max_paying_draft_ms(1.0, 1, slow) == pytest.approx(9.0)


def test_break_even_is_zero_where_the_wide_pass_is_not_dearer() -> None:
    assert break_even_acceptance(1, StepTimes(draft_ms=0.0, target_ms=(10.0, 10.0))) == 0.0


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.6, 0.8, 0.95, 1.0])
def test_best_gamma_is_the_brute_force_maximum(alpha: float) -> None:
    speedups = [speedup_iid(alpha, gamma, TIMES) for gamma in range(9)]
    assert best_gamma(alpha, TIMES) == (int(np.argmax(speedups)), pytest.approx(max(speedups)))


def test_slowest_paying_draft_breaks_even_exactly() -> None:
    draft_ms = max_paying_draft_ms(0.7, 3, TIMES)
    at_limit = StepTimes(draft_ms=draft_ms, target_ms=TIMES.target_ms, overhead_ms=TIMES.overhead_ms)
    assert speedup_iid(0.7, 3, at_limit) == pytest.approx(1.0)


@pytest.mark.parametrize("rates", [[0.5, 0.9], [1.2], [-0.1]])
def test_rates_that_cannot_be_cumulative_are_refused(rates: list[float]) -> None:
    with pytest.raises(ValueError, match="cumulative_acceptance"):
        expected_tokens_from_positions(rates)


def test_unmeasured_gammas_are_refused() -> None:
    with pytest.raises(ValueError, match="measured for 1 positions"):
        expected_tokens_from_positions([0.5], gamma=2)
    with pytest.raises(ValueError, match="was not measured"):
        TIMES.verify_ms(9)
    with pytest.raises(ValueError, match="alpha"):
        expected_tokens_iid(1.01, 2)
