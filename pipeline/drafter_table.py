"""What proposes, side by side: draft chains and trees, Medusa heads and n-grams of one benchmark."""

from collections.abc import Iterable, Mapping
from typing import Any

from rich.table import Table

from eval.bench_conditions import NGRAM, NO_DRAFT, tree_name
from eval.draft_verdict import shows_gain
from pipeline.drafts import MEDUSA
from pipeline.report import BenchRow, gamma_word, lossless_word

Row = Mapping[str, Any]
Minutes = Mapping[str, float | None]


def short_way(row: Row) -> str:
    """How a row proposes, for the name of a figure: `g3`, `gauto` or `tree3x2x1`."""
    if row.get("tree") is not None:
        return f"tree{tree_name(row['tree'])}"
    return "gauto" if row.get("gamma_policy") == "auto" else f"g{row['gamma']}"


def has_drafters(rows: Iterable[Row]) -> bool:
    """Whether there is more than chains of draft models to compare."""
    return any(row["draft"] in (NGRAM, MEDUSA) or row.get("tree") is not None for row in rows)


def round_ms(row: Row) -> float:
    """What a round costs: the draft, the target's verification, and the rest."""
    parts = (row["draft_ms_per_round"], row["verify_ms_per_round"], row["overhead_ms_per_round"])
    return float(sum(parts))


def drafter_figures(rows: Iterable[Row], minutes: Minutes) -> dict[str, float]:
    """tau, milliseconds per round and memory of each native way to propose, and minutes of training, by name."""
    figures = {f"training_minutes_{name}": value for name, value in minutes.items() if value is not None}
    for row in rows:
        if row["backend"] == "native" and row["draft"] != NO_DRAFT:
            name = f"{row['draft']}_t{row['temperature']:g}_{short_way(row)}_b{row['batch']}"
            figures[f"block_efficiency_{name}"] = row["block_efficiency"]
            figures[f"round_ms_{name}"] = round_ms(row)
            figures[f"draft_memory_mb_{name}"] = row["draft_memory_mb"]
    return figures


def drafter_table(rows: Iterable[BenchRow], minutes: Minutes) -> Table:
    """Native rows, with what each costs: per round, in memory and in training."""
    table = Table(title="what proposes (native; tau: tokens per target forward; draft MiB: its weights and cache; min: training)")
    for heading in ("draft", "proposes", "temp", "batch"):
        table.add_column(heading)
    for heading in ("tau", "draft ms", "verify ms", "round ms", "walltime_speedup", "draft MiB", "min", "output"):
        table.add_column(heading, justify="right")
    for row in rows:
        if row["backend"] != "native":
            continue
        figures: Row = row
        trained = minutes.get(row["draft"])
        table.add_row(
            row["draft"],
            gamma_word(row),
            f"{row['temperature']:g}",
            str(row["batch"]),
            f"{row['block_efficiency']:.2f}",
            f"{figures['draft_ms_per_round']:.1f}",
            f"{figures['verify_ms_per_round']:.1f}",
            f"{round_ms(figures):.1f}",
            f"{row['walltime_speedup']:.2f} \\[{row['low']:.2f}, {row['high']:.2f}]",
            f"{figures['draft_memory_mb']:.0f}",
            "-" if trained is None else f"{trained:.1f}",
            lossless_word(row),
            style="bold green" if shows_gain(row["low"], row["high"]) else None,
        )
    return table
