"""The doctor's answer from given times and counts: yes, no, and why; expected figures from the formula."""

import pytest

from eval.theory import StepTimes, break_even_acceptance
from pipeline.compat import Finding
from pipeline.doctor_probe import Probe, ProbeSettings, _summarise
from pipeline.doctor_verdict import answer_of
from specdec_runtime import Output, Stats

CHEAP = StepTimes(draft_ms=1.0, target_ms=(10.0, 10.5, 11.0), overhead_ms=0.5)
DEAR = StepTimes(draft_ms=9.0, target_ms=(10.0, 15.0, 20.0), overhead_ms=0.5)


def outputs(rounds: list[int], *, num_prompts: int = 6) -> list[Output]:
    """Prompts whose rounds, of two proposals each, had these numbers of accepted tokens."""
    stats = Stats()
    for num_accepted in rounds:
        stats.add_round(num_proposed=2, num_accepted=num_accepted)
    return [Output([7] * 20, "length", stats) for _ in range(num_prompts)]


def probe(times: StepTimes, rounds: list[int]) -> Probe:
    found = tuple(_summarise(temperature, outputs(rounds), times) for temperature in (0.0, 1.0))
    return Probe(times, {gamma: break_even_acceptance(gamma, times) for gamma in (1, 2)}, found)


def test_speedup_follows_from_counts_per_position() -> None:
    """10 rounds: 5 accept none, 2 one, 3 two. P(1) = 1/2, P(2 | 1) = 3/5, so tau = 1 + 1/2 + 3/10."""
    one = probe(CHEAP, [0] * 5 + [1] * 2 + [2] * 3).by_temperature[0]
    assert [outlook.tau.value for outlook in one.outlooks] == pytest.approx([1.5, 1.8])
    round_ms = 2 * 1.0 + 11.0 + 0.5
    assert one.outlooks[1].speedup.value == pytest.approx(1.8 * 10.0 / round_ms)
    assert one.acceptance.value == pytest.approx(8 / 15)  # of 15 judged: 10 first ones and 5 second ones
    assert one.best.gamma == 2


def test_yes_needs_the_whole_interval_above_one() -> None:
    answer = answer_of([], probe(CHEAP, [0] * 5 + [1] * 2 + [2] * 3))
    assert (answer.word, answer.exit_code) == ("yes", 0)
    assert "at gamma 2" in answer.why and "1.80 tokens per target forward" in answer.why


def test_no_says_whether_another_draft_could_pay() -> None:
    """Soup 303, 843: an acceptance is good or bad only beside the break-even of its gamma."""
    rejected = answer_of([], probe(CHEAP, [0] * 9 + [1]))
    assert (rejected.word, rejected.exit_code) == ("no", 3)
    assert "break-even is an acceptance of" in rejected.why and "is accepted more often" in rejected.why
    dear = answer_of([], probe(DEAR, [2] * 10))
    assert dear.word == "no" and "No plausible acceptance pays at any gamma here" in dear.why


def test_errors_forbid_and_warnings_do_not() -> None:
    warning, error = Finding("penalty", "warning", "w"), Finding("tokenizer", "error", "e")
    assert answer_of([warning], None, reason="left out", asked=False).exit_code == 0
    assert answer_of([warning], None, reason="cannot be measured").exit_code == 3
    refused = answer_of([warning, error], None)
    assert (refused.word, refused.exit_code) == ("bad pair", 2)
    assert "1 of the findings above forbid it: tokenizer" in refused.why


def test_nothing_proposed_is_said() -> None:
    silent = [Output([7], "stop", Stats(not_speculating="the draft's context of 4 is full"))]
    with pytest.raises(ValueError, match="nothing was proposed at temperature 0: the draft's context of 4"):
        _summarise(0.0, silent, CHEAP)


def test_measuring_stays_inside_the_context() -> None:
    assert ProbeSettings().within(None) == ProbeSettings()
    small = ProbeSettings(max_gamma=4).within(96)
    assert (small.context_tokens, small.max_new_tokens) == (90, 32)
    with pytest.raises(ValueError, match=r"context of 7 positions is too short for --max-gamma 4"):
        ProbeSettings(max_gamma=4).within(7)
