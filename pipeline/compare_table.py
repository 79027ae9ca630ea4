"""One row per run, in words: what `make compare` prints and what its page shows."""

from dataclasses import dataclass

from rich.markup import escape
from rich.table import Table

from pipeline.tracking_read import RunRecord

NOTHING = "-"
#: Settings that are places or labels, and say nothing about what was made.
_PLACES = ("tracking.", "artifacts_dir", "stages", "target.path", "gate.")


@dataclass(frozen=True)
class Line:
    """One run as a row of the table. `changed`: the settings in which the shown runs differ."""

    run: RunRecord
    cells: dict[str, str]
    changed: dict[str, str]


def lines_of(runs: list[RunRecord]) -> list[Line]:
    """A row for each run, the newest first."""
    differing = differing_params(runs)
    return [
        Line(run, cells_of(run), {name: run.params.get(name, NOTHING) for name in differing}) for run in runs
    ]


def cells_of(run: RunRecord) -> dict[str, str]:
    """What is shown of a run, by heading; `-` where it has no such figure."""

    def number(name: str, digits: int) -> str:
        return f"{run.metrics[name]:,.{digits}f}" if name in run.metrics else NOTHING

    status = "" if run.status == "FINISHED" else f" ({run.status.lower()})"
    return {
        "run": (f"{run.group} / " if run.group and run.group not in run.name else "") + run.name + status,
        "started": f"{run.started:%Y-%m-%d %H:%M}",
        "draft": run.tags.get("draft", NOTHING),
        "loss": run.tags.get("loss", NOTHING),
        "corpus tokens": number("num_corpus_tokens", 0),
        "alpha T=0": number("acceptance_rate_t0", 3),
        "alpha T=1": number("acceptance_rate_t1", 3),
        "tau T=0": number("block_efficiency_t0", 2),
        "speedup T=0": number("walltime_speedup_t0", 2),
        "speedup T=1": number("walltime_speedup_t1", 2),
        "train min": number("train_minutes", 1),
        "all min": number("minutes", 1),
    }


def differing_params(runs: list[RunRecord]) -> list[str]:
    """Names of the settings that are not the same in all of these runs, places and labels left out."""
    names = sorted({name for run in runs for name in run.params if not name.startswith(_PLACES)})
    return [name for name in names if len({run.params.get(name) for run in runs}) > 1]


def compare_table(lines: list[Line], *, title: str) -> Table:
    """The table for a terminal."""
    table = Table(title=escape(title))
    for heading in lines[0].cells:
        is_text = heading in ("run", "started", "draft", "loss")
        table.add_column(heading, justify="left" if is_text else "right", overflow="fold")
    for line in lines:
        table.add_row(*map(escape, line.cells.values()))
    return table
