"""A ranking as rows and as a table: the fastest measured draft first, those that cannot be used last."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.markup import escape
from rich.table import Table

from eval.bootstrap import Interval
from eval.draft_verdict import confirm, shows_gain
from pipeline.rank_candidates import Candidate
from pipeline.rank_measure import Outlook

Row = dict[str, Any]


def rank_row(
    candidate: Candidate, outlook: Outlook | None, bench: Sequence[Row], size: Mapping[str, float]
) -> Row:
    """All that is known of a candidate; for one that cannot be used, its reasons and nothing measured."""
    row: Row = {
        "draft": candidate.name,
        "path": candidate.path,
        "compatible": candidate.compatible,
        "reasons": candidate.reasons,
        "warnings": candidate.warnings,
        **size,
    }
    if outlook is None:
        return row
    verdict, times = outlook.verdict, outlook.times
    own = [entry for entry in bench if entry["draft"] == candidate.name]
    best = max(own, key=lambda entry: float(entry["walltime_speedup"]))
    measured = {int(e["gamma"]): Interval(e["walltime_speedup"], e["low"], e["high"]) for e in own}
    confirmation = confirm(verdict, measured)
    return row | {
        "acceptance_rate": outlook.acceptance,
        "cost_ratio": times.cost_ratio,
        "draft_ms": times.draft_ms,
        "target_ms": list(times.target_ms),
        "predicted_speedup_by_gamma": {str(gamma): speedup for gamma, speedup in verdict.speedups.items()},
        "predicted_gamma": verdict.best_gamma,
        "predicted_speedup": verdict.best_speedup,
        "verdict": verdict.meaning,
        "by_the_clock": asdict(confirmation) | {"meaning": confirmation.meaning},
        "measured_gamma": best["gamma"],
        "measured_speedup": best["walltime_speedup"],
        "measured_low": best["low"],
        "measured_high": best["high"],
        "block_efficiency": best["block_efficiency"],
        "measured_speedup_by_gamma": {str(gamma): interval.as_dict() for gamma, interval in measured.items()},
        "num_prompts": best["num_prompts"],
    }


def sort_rows(rows: Sequence[Row]) -> list[Row]:
    """By measured speedup, the best first; unusable ones last."""
    return sorted(rows, key=lambda row: (not row["compatible"], -row.get("measured_speedup", 0.0)))


def rank_table(rows: Sequence[Row]) -> Table:
    """The rows side by side; unusable drafts have the first reason in place of figures."""
    temperatures = list(dict.fromkeys(e["temperature"] for row in rows for e in row.get("acceptance_rate", ())))
    table = Table(title="drafts, fastest first (speedup over the strongest plain decoding, 95% interval)")
    for heading in ("draft", "usable"):
        table.add_column(heading, overflow="fold")
    for heading in (
        "parameters",
        "memory",
        *(f"acceptance T={t:g}" for t in temperatures),
        "cost ratio",
        "predicted",
        "measured",
        "tau",
    ):
        table.add_column(heading, justify="right")
    for heading in ("verdict", "by the clock"):
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*_cells(row, temperatures), style=_style(row))
    return table


def _cells(row: Row, temperatures: Sequence[float]) -> list[str]:
    name, usable = escape(row["draft"]), "no" if not row["compatible"] else "after export" if row["warnings"] else "yes"
    size = [f"{row['num_parameters'] / 1e6:.1f}M", _memory(row)] if "num_parameters" in row else ["-", "-"]
    if "measured_speedup" not in row:
        blanks = ["-"] * (len(temperatures) + 5)
        return [name, usable, *size, *blanks, escape(row["reasons"][0]) if row["reasons"] else "-"]
    rates = {entry["temperature"]: entry for entry in row["acceptance_rate"]}
    predicted = f"{row['predicted_speedup']:.2f} (gamma {row['predicted_gamma'] or '-'})"
    measured = (
        f"{row['measured_speedup']:.2f} [{row['measured_low']:.2f}, {row['measured_high']:.2f}] (gamma {row['measured_gamma']})"
    )
    return [
        name,
        usable,
        *size,
        *(f"{rates[t]['value']:.3f}" if t in rates else "-" for t in temperatures),
        f"{row['cost_ratio']:.3f}",
        predicted,
        escape(measured),
        f"{row['block_efficiency']:.2f}",
        row["verdict"],
        row["by_the_clock"]["meaning"],
    ]


def _memory(row: Row) -> str:
    return f"{row['weights_mib']:.0f} MiB + {row['kv_mib_per_1000_tokens']:.1f} MiB/1k tokens"


def _style(row: Row) -> str | None:
    if not row["compatible"]:
        return "dim"
    return "bold green" if shows_gain(row.get("measured_low", 0.0), row.get("measured_high", 0.0)) else None
