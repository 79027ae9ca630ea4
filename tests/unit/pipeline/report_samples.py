"""A report as a run leaves it, with the fields that a test cares about set by the test."""

from typing import Any

from pipeline.report import AcceptanceRow, BenchRow, Report


def acceptance_row(
    draft: str = "distilled", temperature: float = 0.0, sampler: str = "probabilistic", value: float = 0.6
) -> AcceptanceRow:
    return {
        "draft": draft,
        "temperature": temperature,
        "sampler": sampler,
        "value": value,
        "low": value - 0.02,
        "high": value + 0.02,
        "num_positions": 1000,
        "num_prompts": 20,
    }


def bench_row(
    draft: str = "distilled", gamma: int = 2, speedup: float = 1.3, half_width: float = 0.1, **changes: Any
) -> BenchRow:
    row: BenchRow = {
        "backend": "native",
        "draft": draft,
        "temperature": 0.0,
        "gamma": gamma,
        "batch": 1,
        "tokens_per_second": 40.0 * speedup,
        "walltime_speedup": speedup,
        "low": speedup - half_width,
        "high": speedup + half_width,
        "predicted_speedup": None if draft == "none" else speedup * 1.02,
        "block_efficiency": 1.0 if draft == "none" else 1.9,
        "latency_ms_p50": 20.0,
        "latency_ms_p99": 31.0,
        "lossless": True,
    }
    row.update(changes)  # type: ignore[typeddict-item]
    return row


def make_report(bench: list[BenchRow] | None = None, acceptance: list[AcceptanceRow] | None = None) -> Report:
    plain = bench_row("none", gamma=0, speedup=1.0, half_width=0.0)
    return {
        "target": {"name": "big", "path": "/models/big"},
        "draft": {
            "name": "big-draft",
            "path": "draft",
            "num_parameters": 12_345_678,
            "num_layers": 2,
            "hidden_size": 64,
        },
        "machine": {
            "processor": "Some CPU",
            "gpu": None,
            "num_threads": 2,
            "dtype": "bfloat16",
            "versions": {"torch": "2.13.0", "transformers": "5.19.0"},
        },
        "corpus": {"num_response_tokens": 87_000},
        "minutes": {"corpus": 5.0, "distill": 10.0},
        "acceptance_rate": [acceptance_row("undistilled", value=0.01), acceptance_row()]
        if acceptance is None
        else acceptance,
        "bench": [plain, bench_row(gamma=1, speedup=1.2), bench_row()] if bench is None else bench,
    }
