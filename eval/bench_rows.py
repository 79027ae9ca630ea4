"""From measurements to the rows of the report: speed, speedup with its interval, prediction, latency."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from eval.bench_measure import Measurement
from eval.bootstrap import bootstrap_speedup
from eval.theory import expected_tokens_from_positions, predicted_speedup
from specdec_runtime.request import Output
from specdec_runtime.stats import Stats

Row = dict[str, Any]


def strongest_baseline(measurements: Sequence[Measurement]) -> Measurement:
    """The plain decoding with the most tokens per second, at one temperature and batch size."""
    return max((m for m in measurements if m.condition.is_plain), key=lambda m: m.tokens_per_second)


def bench_row(measurement: Measurement, baseline: Measurement, *, num_bootstrap: int, seed: int) -> Row:
    """One row without its check of the tokens.

    `gamma` is the upper bound where `gamma_policy` is auto, 0 in plain decoding, and the depth of a `tree`. `walltime_speedup` is
    against `baseline`, paired by group of prompts (at batch 1 a group is a prompt), with `low` and `high` the
    ends of a 95% bootstrap interval over groups. `latency_ms_*` is time per token after the first: the gap
    before a round's tokens divided by their number. `ttft_ms_*` is the wait for the first token and
    `request_latency_ms_*` for the last one, both from the start of the call. `acceptance_by_position`: share
    of rounds that accepted proposals 1..i; `conditional_acceptance`: of those that accepted 1..i-1.
    """
    condition, stats = measurement.condition, measurement.stats
    speedup = bootstrap_speedup(
        measurement.num_tokens,
        measurement.seconds,
        baseline.num_tokens,
        baseline.seconds,
        num_bootstrap=num_bootstrap,
        seed=seed,
    )
    latencies_ms = [ms for output in measurement.outputs for ms in token_latencies_ms(output)]
    ttft_ms = [1e3 * output.token_times_s[0] for output in measurement.outputs]
    request_ms = [1e3 * output.token_times_s[-1] for output in measurement.outputs]
    return {
        "backend": condition.backend,
        "draft": condition.draft,
        "temperature": condition.temperature,
        "gamma": condition.gamma,
        "gamma_policy": condition.gamma_policy,
        "tree": condition.tree,
        "batch": condition.batch,
        "tokens_per_second": measurement.tokens_per_second,
        "walltime_speedup": speedup.value,
        "low": speedup.low,
        "high": speedup.high,
        "baseline": baseline.condition.backend,
        "predicted_speedup": predict(measurement, baseline),
        "block_efficiency": stats.block_efficiency,
        "draft_acceptance_rate": None if condition.is_plain else stats.draft_acceptance_rate,
        "acceptance_by_position": cumulative_acceptance(stats),
        "conditional_acceptance": stats.conditional_acceptance,
        "latency_ms_p50": _percentile(latencies_ms, 50),
        "latency_ms_p99": _percentile(latencies_ms, 99),
        "ttft_ms_p50": _percentile(ttft_ms, 50),
        "request_latency_ms_p50": _percentile(request_ms, 50),
        "request_latency_ms_p99": _percentile(request_ms, 99),
        "draft_ms_per_round": _per_round(stats, stats.draft_ms),
        "verify_ms_per_round": _per_round(stats, stats.verify_ms),
        "overhead_ms_per_round": _per_round(stats, stats.overhead_ms),
        "peak_memory_mb": measurement.peak_memory_mb,
        "num_prompts": len(measurement.outputs),
        "num_groups": len(measurement.seconds),
        "num_tokens": sum(measurement.num_tokens),
    }


def cumulative_acceptance(stats: Stats) -> list[float]:
    """Entry i: the share of rounds in which proposals 1..i+1 were all accepted."""
    return [num / stats.num_rounds for num in stats.accepted_per_position] if stats.num_rounds else []


def predict(measurement: Measurement, baseline: Measurement) -> float | None:
    """Speedup from this run's per-position acceptance and step times (`theory.predicted_speedup`).

    T(1) is the baseline's decoding time per token and row; T_draft, T(gamma+1) and overhead are this
    condition's, each summed over rows and divided by the rows' rounds. None where the backend has no clock
    inside, 1.0 for the baseline.
    """
    stats, plain, gamma = measurement.stats, baseline.stats, measurement.condition.gamma
    if measurement is baseline:
        return 1.0
    has_no_clock = not measurement.condition.is_plain and measurement.condition.backend in ("hf_assisted", "vllm")
    if has_no_clock or not stats.num_rounds or not plain.num_rounds:
        return None
    num_requests = len(measurement.outputs)
    return predicted_speedup(
        # The share of accepted tokens is of all rounds, also of those that the end of an output cut short.
        tau=expected_tokens_from_positions(cumulative_acceptance(stats)),
        gamma=gamma,
        draft_ms=_per_round(stats, stats.draft_ms) / max(gamma, 1),
        target_ms=_per_round(plain, plain.verify_ms + plain.overhead_ms),
        verify_ms=_per_round(stats, stats.verify_ms),
        overhead_ms=_per_round(stats, stats.overhead_ms),
        prefill_ms=plain.prefill_ms / num_requests,
        draft_prefill_ms=max(stats.prefill_ms - plain.prefill_ms, 0.0) / num_requests,
        num_tokens=stats.num_committed / num_requests,
    )


def token_latencies_ms(output: Output) -> Iterator[float]:
    """Milliseconds per token after the first commit; a block's gap is shared by its tokens."""
    times = output.token_times_s
    ends = [i for i in range(len(times)) if i + 1 == len(times) or times[i + 1] != times[i]]
    for before, end in pairwise(ends):
        num_tokens = end - before
        yield from [1e3 * (times[end] - times[before]) / num_tokens] * num_tokens


def _percentile(values: Sequence[float], percent: float) -> float | None:
    return float(np.percentile(values, percent)) if values else None


def _per_round(stats: Stats, milliseconds: float) -> float:
    return milliseconds / stats.num_rounds if stats.num_rounds else 0.0
