"""The preflight's prediction held against the bench, from the finished stages: a section of the report, and a table."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from eval.prediction import TOLERANCE, prediction_rows, times_of_verdict
from pipeline.report import read_result
from pipeline.shortlist import times_of_chosen_head

Row = dict[str, Any]


def read_prediction(inputs: Mapping[str, Path], *, sampler: str) -> list[Row]:
    """Rows as of `eval.prediction.prediction_rows`, from the folders of preflight, distill, eval and bench; [] without preflight."""
    if "preflight" not in inputs:
        return []
    times = times_of_verdict(read_result(inputs["preflight"], "verdict.json"))
    return prediction_rows(
        times_of_chosen_head(times, inputs["distill"]),
        read_result(inputs["eval"], "acceptance.json").get("rounds", []),
        read_result(inputs["bench"], "bench.json")["bench"],
        sampler=sampler,
    )


def prediction_table(rows: Sequence[Row]) -> Table:
    """Predicted against measured, the reason where they are apart, and the errors with the bench's own text and times."""
    table = Table(title=f"prediction (preflight's times, held-out acceptance) against the bench; off by more than {TOLERANCE:.0%}: why")
    for heading in ("draft", "temp", "gamma", "predicted", "measured", "error", "on its text", "and its times"):
        table.add_column(heading, justify="right" if heading != "draft" else "left")
    table.add_column("reason")
    for row in rows:
        table.add_row(
            row["draft"],
            f"{row['temperature']:g}",
            str(row["gamma"]),
            f"{row['predicted']:.2f}",
            f"{row['measured']:.2f} \\[{row['low']:.2f}, {row['high']:.2f}]",
            f"{row['error']:+.0%}",
            *("" if row[name] is None else f"{row[name]:+.0%}" for name in ("error_on_same_text", "error_paired")),
            row["reason"] or "",
            style=None if row["within"] else "yellow",
        )
    return table
