"""Was the verdict right? The preflight's step times with the measured acceptance, against what the bench measured.

    predicted = tau * T(1) / (gamma * T_draft + T(gamma+1) + overhead)

with tau worked out from held-out text (`eval.rounds`) and the times of the preflight, which was taken before any
training. Where it is more than `TOLERANCE` off, the reason is the part that moved the ratio most: tokens per round, the
plain step, the draft's steps, the verification, the overhead, or what lies outside rounds. Two more predictions leave out,
one after the other, what is no fault of the model: with tau worked out from plain decoding's answers to the bench's own
prompts (`eval.bench_text`), what those prompts differ in; and with the bench's own step times as well, how the machine has
changed since the preflight.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from eval.theory import StepTimes

Row = dict[str, Any]
TOLERANCE = 0.10


def times_of_verdict(verdict: Mapping[str, Any]) -> StepTimes:
    """The step times that `verdict.json` records."""
    target_ms = verdict["T_target_ms"]
    return StepTimes(
        draft_ms=verdict["T_draft_ms"],
        draft_first_ms=verdict["T_draft_first_ms"],
        target_ms=tuple(target_ms[str(width)] for width in range(1, len(target_ms) + 1)),
        overhead_ms=verdict["overhead_ms"],
    )


def prediction_rows(
    times: StepTimes, rounds: Sequence[Mapping[str, Any]], bench: Sequence[Mapping[str, Any]], *, sampler: str
) -> list[Row]:
    """One row per native bench row of a draft at batch 1 and a fixed gamma, no tree, for which both tau and T(gamma+1) are known.

    Args:
        rounds: `rounds` of `acceptance.json`. bench: rows of `bench.json`. sampler: the one that was benchmarked.

    Returns:
        {draft, temperature, gamma, predicted, measured, low, high, error, within, reason, predicted_on_same_text,
        error_on_same_text, predicted_paired, error_paired}: `error` is predicted / measured - 1, `within` whether it is at
        most 10% off, `reason` None where it is; the others are None where the bench has no acceptance from its text, or no
        native plain decoding.
    """
    entries = {(r["draft"], r["temperature"]): r for r in rounds if r["sampler"] == sampler and r["warper"] == "none"}
    # Where every answer was one token long there was no round, and nothing was predicted for it.
    bench = [r for r in bench if r["backend"] == "native" and r["batch"] == 1 and r.get("verify_ms_per_round") != 0]
    plain = {r["temperature"]: r for r in bench if r["draft"] == "none"}
    result = []
    for row in bench:
        entry = entries.get((row["draft"], row["temperature"]))
        is_chain = row.get("gamma_policy") != "auto" and row.get("tree") is None
        if entry is None or not is_chain or not 1 <= row["gamma"] <= times.max_gamma:
            continue
        cumulative = entry["cumulative_acceptance"].get(str(row["gamma"]))
        if cumulative is not None:
            result.append(_compare(times, 1 + sum(cumulative), row, plain.get(row["temperature"])))
    return result


def _compare(times: StepTimes, tau: float, row: Mapping[str, Any], plain: Mapping[str, Any] | None) -> Row:
    gamma, measured = int(row["gamma"]), float(row["walltime_speedup"])
    predicted = times.speedup(tau=tau, gamma=gamma)
    on_same_text = paired = None
    if "acceptance_from_text" in row:
        tau_on_same_text = 1 + sum(row["acceptance_from_text"])
        on_same_text = times.speedup(tau=tau_on_same_text, gamma=gamma)
        if plain is not None:
            paired = tau_on_same_text * _round_ms(plain) / _round_ms(row) * float(plain["walltime_speedup"])
    error = predicted / measured - 1
    within = abs(error) <= TOLERANCE
    return {
        **{name: row[name] for name in ("draft", "temperature", "gamma", "low", "high")},
        "predicted": predicted,
        "measured": measured,
        "error": error,
        "within": within,
        "reason": None if within else _reason(times, tau, row, plain),
        "predicted_on_same_text": on_same_text,
        "error_on_same_text": None if on_same_text is None else on_same_text / measured - 1,
        "predicted_paired": paired,
        "error_paired": None if paired is None else paired / measured - 1,
    }


def _round_ms(row: Mapping[str, Any]) -> float:
    """Milliseconds of a round, or of a plain step, as the bench measured its parts."""
    return sum(float(row[f"{part}_ms_per_round"]) for part in ("draft", "verify", "overhead"))


def _reason(times: StepTimes, tau: float, row: Mapping[str, Any], plain: Mapping[str, Any] | None) -> str:
    """The part that moved the ratio most."""
    gamma = int(row["gamma"])
    expected_ms = {
        "draft steps": gamma * times.mean_draft_ms(gamma),
        "verification": times.verify_ms(gamma),
        "overhead": times.overhead_ms,
    }
    measured_ms = {
        "draft steps": float(row["draft_ms_per_round"]),
        "verification": float(row["verify_ms_per_round"]),
        "overhead": float(row["overhead_ms_per_round"]),
    }
    round_ms = sum(expected_ms.values())
    effects = []
    measured_tau = 1 + sum(row["acceptance_by_position"])
    effects.append((math.log(measured_tau / tau), f"tokens per round: {tau:.2f} on held-out text, {measured_tau:.2f} in the bench"))
    for name, expected in expected_ms.items():
        effect = math.log(round_ms / (round_ms - expected + measured_ms[name]))
        effects.append((effect, f"{name}: {expected:.1f} ms a round in the preflight, {measured_ms[name]:.1f} in the bench"))
    if plain is not None:
        step_ms = _round_ms(plain)
        text = f"a plain step: {times.target_ms[0]:.1f} ms in the preflight, {step_ms:.1f} in the bench"
        effects.append((math.log(step_ms / times.target_ms[0]), text))
        if plain["walltime_speedup"] < 1:
            text = f"the strongest plain decoding was {row['baseline']}, native plain decoding {plain['walltime_speedup']:.2f} of it"
            effects.append((math.log(plain["walltime_speedup"]), text))
        speedup = measured_tau * step_ms / sum(measured_ms.values())
        rest = math.log(float(row["walltime_speedup"]) / speedup)
        effects.append((rest, "outside rounds: prompts, which cost the same with and without a draft, and the draft's own prefill"))
    return max(effects, key=lambda effect: abs(effect[0]))[1]
