"""Three drafts told apart from their costs and acceptance; and the clock agrees on random weights."""

import numpy as np
import pytest
import torch

from eval.bootstrap import Interval
from eval.config import BenchConfig
from eval.draft_verdict import Confirmation, DraftVerdict, confirm, judge_draft, shows_gain
from eval.random_bench import build_model, run_random_bench
from eval.rounds import rounds_of
from eval.shapes import SHAPES, Shape
from eval.theory import StepTimes, break_even_acceptance, expected_tokens_iid
from eval.timing import measure_step_times

GAMMAS = range(1, 9)
#: A target whose wide forwards cost more and more, as on a CPU.
TARGET_MS = (40.0, 42.0, 45.0, 49.0, 54.0, 60.0, 67.0, 75.0, 84.0)


def taus(alpha: float) -> dict[int, float]:
    return {gamma: expected_tokens_iid(alpha, gamma) for gamma in GAMMAS}


def test_one_pays_one_only_at_gamma_1_and_2_one_does_not() -> None:
    """Soup 303, 843: alpha .813 sold as good where break-even at k=5 was .832."""
    cheap = StepTimes(draft_ms=3.0, target_ms=TARGET_MS, overhead_ms=1.0)
    middling = StepTimes(draft_ms=10.0, target_ms=TARGET_MS, overhead_ms=1.0)
    dear = StepTimes(draft_ms=30.0, target_ms=TARGET_MS, overhead_ms=1.0)
    pays = judge_draft(taus(0.8), cheap)
    assert pays.pays and pays.meaning == "pays" and pays.best_gamma >= 4
    short = judge_draft(taus(0.45), middling)
    assert short.paying_gammas == [1, 2] and short.meaning == "pays only at gamma 1, 2"
    assert short.best_gamma in (1, 2) and short.best_speedup > 1
    never = judge_draft(taus(0.6), dear)
    assert not never.pays and never.meaning == "does not pay"
    assert (never.best_gamma, never.best_speedup) == (0, 1.0)


def test_it_agrees_with_the_break_even_acceptance() -> None:
    times = StepTimes(draft_ms=6.0, target_ms=TARGET_MS, overhead_ms=1.0)
    for gamma in GAMMAS:
        edge = break_even_acceptance(gamma, times)
        assert edge is not None
        for alpha, pays in ((edge - 0.01, False), (edge + 0.01, True)):
            verdict = judge_draft({gamma: expected_tokens_iid(alpha, gamma)}, times)
            assert verdict.pays is pays


def test_the_clock_confirms_refutes_or_leaves_open() -> None:
    verdict = DraftVerdict({1: 1.2, 2: 1.1, 3: 0.98, 4: 0.9}, [1, 2], 1, 1.2)
    intervals = {1: (1.1, 1.05, 1.15), 2: (0.9, 0.85, 0.95), 3: (0.99, 0.95, 1.04), 4: (0.8, 0.75, 0.85)}
    result = confirm(verdict, {gamma: Interval(*interval) for gamma, interval in intervals.items()})
    assert result == Confirmation(confirmed=[1, 4], open=[3], refuted=[2])
    assert result.meaning == "confirmed at gamma 1, 4; open at gamma 3; refuted at gamma 2"
    assert confirm(verdict, {}).meaning == ""


def test_one_prompt_confirms_nothing() -> None:
    """Its interval has no width: that is no certainty."""
    assert confirm(DraftVerdict({1: 1.2}, [1], 1, 1.2), {1: Interval(1.3, 1.3, 1.3)}) == Confirmation([], [1], [])
    assert [shows_gain(*interval) for interval in ((1.3, 1.3), (1.2, 1.4), (1.0, 1.2), (0.9, 1.2))] == [False, True, False, False]


def test_autocorrelated_acceptance_is_not_taken_for_iid() -> None:
    """Runs of easy and hard tokens with mean .6: what stands, stands together, so long rounds gain more or less than iid."""
    runs = np.tile(np.repeat([1.0, 0.2], 20), 30).astype(np.float32)
    times = StepTimes(draft_ms=2.0, target_ms=TARGET_MS, overhead_ms=0.5)
    measured = {g: rounds_of([runs], g, was_cut=[True]).block_efficiency().value for g in GAMMAS}
    assert judge_draft(measured, times).speedups[8] != pytest.approx(judge_draft(taus(0.6), times).speedups[8], rel=0.1)


def test_gammas_without_times_are_left_out_and_none_is_refused() -> None:
    times = StepTimes(draft_ms=1.0, target_ms=(10.0, 11.0))
    assert list(judge_draft(taus(0.5), times).speedups) == [1]
    with pytest.raises(ValueError, match="none has both"):
        judge_draft({3: 2.0}, times)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("draft", "acceptance", "pays"),
    [("fast", 0.9, {1: True, 24: True}), ("middling", 0.75, {1: True, 24: False}), ("slow", 0.3, {1: False, 24: False})],
)
def test_the_bench_confirms_the_verdict_on_random_weights(
    draft: str, acceptance: float, pays: dict[int, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real step times, synthetic acceptance: what the verdict says beforehand is what the clock says afterwards.

    The cases lie far apart, since other processes share the machine that tests run on.
    """
    shapes = {
        "target": Shape("llama", 4096, 512, 2048, 12, 8, 4, True),
        "fast": Shape("llama", 4096, 64, 128, 1, 2, 1, True),
        "middling": Shape("llama", 4096, 256, 1024, 3, 4, 2, True),
        "slow": Shape("llama", 4096, 512, 2048, 10, 8, 4, True),
    }
    for name, shape in shapes.items():
        monkeypatch.setitem(SHAPES, name, shape)
    models = [
        build_model(shapes[name], dtype=torch.float32, device="cpu", max_tokens=128, vocab_size=4096)
        for name in ("target", draft)
    ]
    times = measure_step_times(*models, max_gamma=24, context_tokens=32, num_repeats=7, max_seconds=20)
    verdict = judge_draft({gamma: expected_tokens_iid(acceptance, gamma) for gamma in pays}, times)
    config = BenchConfig(
        target="random:target", draft=f"random:{draft}", acceptance=acceptance, prompt_tokens=8, num_prompts=2,
        max_new_tokens=36, gammas=list(pays), temperatures=[0.0], backends=["native"], dtype="float32", num_bootstrap=50,
    )  # fmt: skip
    rows = run_random_bench(config, device="cpu").rows
    measured = {row["gamma"]: row["walltime_speedup"] for row in rows if row["draft"] != "none"}
    assert {gamma: speedup > 1 for gamma, speedup in verdict.speedups.items()} == pays, verdict
    assert {gamma: speedup > 1 for gamma, speedup in measured.items()} == pays, (measured, verdict)
