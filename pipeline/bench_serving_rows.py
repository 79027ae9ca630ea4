"""A load point of `bench_serving`, what is reported of it, and the table of all."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table


@dataclass(frozen=True)
class Load:
    """Requests arrive at `rate` per second (Poisson), or `concurrency` of them are always under way."""

    rate: float | None = None
    concurrency: int | None = None

    @property
    def name(self) -> str:
        """As the table shows it."""
        return f"{self.rate:g}/s" if self.rate is not None else f"{self.concurrency} at once"

    def words(self) -> list[str]:
        """For `vllm bench serve`."""
        if self.rate is not None:
            return ["--request-rate", f"{self.rate:g}"]
        return ["--request-rate", "inf", "--max-concurrency", str(self.concurrency)]


def row_of(result: dict[str, Any], *, draft: str, load: Load, temperature: float) -> dict[str, Any]:
    """Of `vllm bench serve`'s result, what is reported. Acceptance is accepted / proposed tokens, in [0, 1]."""
    acceptance = result.get("spec_decode_acceptance_rate")
    return {
        "draft": draft,
        "temperature": temperature,
        "load": load.name,
        **asdict(load),
        "output_tokens_per_second": result["output_throughput"],
        "requests_per_second": result["request_throughput"],
        **{
            f"{metric}_ms_{p}": result[f"{p}_{metric}_ms"]
            for metric in ("ttft", "tpot", "e2el")
            for p in ("p50", "p99")
        },
        "draft_acceptance_rate": None if acceptance is None else acceptance / 100,
        "tokens_per_forward": result.get("spec_decode_acceptance_length", 1.0),
        "acceptance_by_position": result.get("spec_decode_per_position_acceptance_rates"),
        "num_output_tokens": result["total_output_tokens"],
        "seconds": result["duration"],
    }


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """Plain and drafted rows of one load below each other."""
    shown = Table(title="vLLM on held-out prompts")
    for name in (
        "T",
        "load",
        "draft",
        "tokens/s",
        "TTFT p50 ms",
        "p99",
        "TPOT p50 ms",
        "p99",
        "acceptance",
        "tokens/forward",
    ):
        shown.add_column(name, justify="left" if name in ("load", "draft") else "right")
    order = {key: i for i, key in enumerate(dict.fromkeys((r["temperature"], r["load"]) for r in rows))}
    for row in sorted(rows, key=lambda r: order[r["temperature"], r["load"]]):
        acceptance = row["draft_acceptance_rate"]
        shown.add_row(
            f"{row['temperature']:g}", row["load"], row["draft"], f"{row['output_tokens_per_second']:.1f}",
            *(f"{row[key]:.0f}" for key in ("ttft_ms_p50", "ttft_ms_p99")),
            *(f"{row[key]:.1f}" for key in ("tpot_ms_p50", "tpot_ms_p99")),
            "" if acceptance is None else f"{acceptance:.3f}", f"{row['tokens_per_forward']:.2f}",
        )  # fmt: skip
    return shown
