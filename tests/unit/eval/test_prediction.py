"""The preflight's prediction against the bench: right where nothing moved, and the right reason where something did."""

from typing import Any

import pytest

from eval.prediction import prediction_rows, times_of_verdict
from eval.theory import StepTimes

VERDICT = {
    "T_target_ms": {"1": 40.0, "2": 42.0, "3": 45.0},
    "T_draft_ms": 4.0,
    "T_draft_first_ms": 6.0,
    "overhead_ms": 1.0,
}
CUMULATIVE = {"1": [0.6], "2": [0.6, 0.3]}
ROUNDS = [
    {"draft": "distilled", "temperature": 0.0, "sampler": s, "warper": "none", "cumulative_acceptance": CUMULATIVE}
    for s in ("probabilistic", "greedy")
]


def plain(**changes: Any) -> dict[str, Any]:
    return {
        "backend": "native", "draft": "none", "temperature": 0.0, "gamma": 0, "batch": 1, "walltime_speedup": 1.0,
        "draft_ms_per_round": 0.0, "verify_ms_per_round": 39.0, "overhead_ms_per_round": 1.0, **changes,
    }  # fmt: skip


def drafted(gamma: int = 2, **changes: Any) -> dict[str, Any]:
    """A row in which everything is as the preflight had it: (1 + .6 + .3) * 40 / (6 + 4 + 45 + 1)."""
    speedup = {1: 1.6 * 40 / 49, 2: 1.9 * 40 / 56}[gamma]
    return {
        "backend": "native", "draft": "distilled", "temperature": 0.0, "gamma": gamma, "gamma_policy": "fixed", "batch": 1,
        "walltime_speedup": speedup, "low": speedup - 0.1, "high": speedup + 0.1, "baseline": "native",
        "acceptance_by_position": CUMULATIVE[str(gamma)], "draft_ms_per_round": {1: 6.0, 2: 10.0}[gamma],
        "verify_ms_per_round": {1: 42.0, 2: 45.0}[gamma], "overhead_ms_per_round": 1.0, **changes,
    }  # fmt: skip


def rows_of(*bench: dict[str, Any], sampler: str = "greedy") -> list[dict[str, Any]]:
    return prediction_rows(times_of_verdict(VERDICT), ROUNDS, bench, sampler=sampler)


def test_the_times_are_read_back() -> None:
    assert times_of_verdict(VERDICT) == StepTimes(
        draft_ms=4.0, draft_first_ms=6.0, target_ms=(40.0, 42.0, 45.0), overhead_ms=1.0
    )


def test_where_nothing_moved_the_prediction_is_exact() -> None:
    rows = rows_of(plain(), drafted(1), drafted(2))
    assert [row["gamma"] for row in rows] == [1, 2]
    assert [row["error"] for row in rows] == pytest.approx([0.0, 0.0])
    assert [(row["within"], row["reason"]) for row in rows] == [(True, None)] * 2


def test_without_a_round_nothing_is_predicted() -> None:
    """Every prompt answered by EOS at once: neither side has milliseconds per round to compare."""
    no_round = {"draft_ms_per_round": 0.0, "verify_ms_per_round": 0.0, "overhead_ms_per_round": 0.0}
    silent = drafted(2, **no_round, acceptance_by_position=[], acceptance_from_text=[0.0, 0.0], walltime_speedup=0.9)
    assert rows_of(plain(**no_round), silent) == []
    (row,) = rows_of(plain(**no_round), drafted(2, walltime_speedup=1.0, acceptance_from_text=[0.6, 0.3]))
    assert row["predicted_paired"] is None and "outside rounds" not in row["reason"]


def test_trees_and_automatic_lengths_are_not_predicted() -> None:
    rows = rows_of(plain(), drafted(1), drafted(2, tree="2x1"), drafted(2, gamma_policy="auto"))
    assert [row["gamma"] for row in rows] == [1]


@pytest.mark.parametrize(
    ("changes", "plain_changes", "reason"),
    [
        ({"acceptance_by_position": [0.3, 0.1], "walltime_speedup": 1.4 * 40 / 56}, {}, "tokens per round: 1.90"),
        ({"draft_ms_per_round": 25.0, "walltime_speedup": 1.9 * 40 / 71}, {}, "draft steps: 10.0 ms"),
        ({"verify_ms_per_round": 60.0, "walltime_speedup": 1.9 * 40 / 71}, {}, "verification: 45.0 ms"),
        ({"overhead_ms_per_round": 12.0, "walltime_speedup": 1.9 * 40 / 67}, {}, "overhead: 1.0 ms"),
        ({"walltime_speedup": 1.9 * 30 / 56}, {"verify_ms_per_round": 29.0}, "a plain step: 40.0 ms"),
        ({"walltime_speedup": 1.0}, {}, "outside rounds"),
    ],
)
def test_the_part_that_moved_is_named(changes: dict[str, Any], plain_changes: dict[str, Any], reason: str) -> None:
    (row,) = rows_of(plain(**plain_changes), drafted(2, **changes))
    assert not row["within"]
    assert reason in row["reason"]


def test_easier_prompts_explain_an_error_that_their_own_text_does_not_have() -> None:
    easy = {"acceptance_by_position": [0.9, 0.6], "walltime_speedup": 2.5 * 40 / 56}
    (row,) = rows_of(plain(), drafted(2, **easy, acceptance_from_text=[0.9, 0.6]))
    assert not row["within"] and "tokens per round: 1.90 on held-out text, 2.50 in the bench" in row["reason"]
    assert row["predicted_on_same_text"] == pytest.approx(2.5 * 40 / 56)
    assert row["error_on_same_text"] == pytest.approx(0.0)
    (without,) = rows_of(plain(), drafted(2))
    assert without["predicted_on_same_text"] is None and without["error_on_same_text"] is None
    assert without["predicted_paired"] is None and without["error_paired"] is None


def test_a_slower_machine_explains_an_error_that_the_bench_s_own_times_do_not_have() -> None:
    """Everything takes half as long again in the bench, but the verification twice as long; `hf_generate` is the baseline."""
    speedup = 1.9 * 60 / (15 + 90 + 1.5) * 0.9
    slow = drafted(2, acceptance_from_text=[0.6, 0.3], walltime_speedup=speedup, draft_ms_per_round=15.0,
                   verify_ms_per_round=90.0, overhead_ms_per_round=1.5)  # fmt: skip
    (row,) = rows_of(plain(verify_ms_per_round=58.5, overhead_ms_per_round=1.5, walltime_speedup=0.9), slow)
    assert row["predicted_paired"] == pytest.approx(speedup) and row["error_paired"] == pytest.approx(0.0)
    assert row["error_on_same_text"] > 0.1


def test_a_stronger_baseline_of_another_backend_is_named() -> None:
    (row,) = rows_of(plain(walltime_speedup=0.7), drafted(2, walltime_speedup=0.7 * 1.9 * 40 / 56, baseline="hf_generate"))
    assert "hf_generate" in row["reason"] and "0.70" in row["reason"]


def test_only_comparable_rows_are_compared() -> None:
    others = [
        drafted(2, backend="hf_assisted"),
        drafted(2, batch=4),
        drafted(2, gamma_policy="auto"),
        drafted(2, draft="other"),
        drafted(2, temperature=1.0),
        {**drafted(2), "gamma": 5},
    ]
    assert rows_of(plain(), *others) == []
    assert len(rows_of(plain(), drafted(2), sampler="probabilistic")) == 1
    assert rows_of(plain(), drafted(2), sampler="none") == []
