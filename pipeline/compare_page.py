"""The comparison of runs as one self-contained HTML page: nothing in it is loaded from elsewhere."""

from collections.abc import Iterable, Sequence
from html import escape

from matplotlib.figure import Figure

from pipeline.compare_table import NOTHING, Line
from pipeline.inline_image import inline_image
from pipeline.tracking_read import RunRecord

MAX_CURVES = 12
_STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 90rem; padding: 0 1rem; color: #1d2330; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .7rem; border-bottom: 1px solid #dde1e8; text-align: right; white-space: nowrap; }
th { background: #f4f6f9; } .text { text-align: left; } .best { font-weight: 700; color: #17603a; }
img { max-width: 100%; height: auto; }
"""
_TEXT = ("run", "started", "draft", "loss")
_HIGHER_IS_BETTER = ("alpha T=0", "alpha T=1", "tau T=0", "speedup T=0", "speedup T=1")


def compare_page(lines: Sequence[Line], *, title: str) -> str:
    """The table with the best of each column marked, the settings that differ, and the plots that the runs allow."""
    runs = [line.run for line in lines]
    parts = [f"<h1>{escape(title)}</h1>", _table([line.cells for line in lines], mark_best=True)]
    changed = [{"run": line.cells["run"], **line.changed} for line in lines]
    if len(changed[0]) > 1:
        parts += ["<h2>Settings that differ</h2>", _table(changed, mark_best=False)]
    for heading, figure in figures_of(runs).items():
        parts += [f"<h2>{escape(heading)}</h2>", inline_image(figure, description=heading, dpi=130)]
    body = "\n".join(parts)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body>\n{body}\n</body></html>\n"
    )


def _table(rows: Sequence[dict[str, str]], *, mark_best: bool) -> str:
    best = {name: _highest(row[name] for row in rows) for name in _HIGHER_IS_BETTER} if mark_best else {}

    def cell(name: str, value: str) -> str:
        classes = ["text"] if name in _TEXT or not mark_best else []
        classes += ["best"] if value != NOTHING and best.get(name) == value else []
        return f'<td class="{" ".join(classes)}">{escape(value)}</td>'

    head = "".join(f'<th class="{"text" if name in _TEXT else ""}">{escape(name)}</th>' for name in rows[0])
    body = "\n".join("<tr>" + "".join(cell(*item) for item in row.items()) + "</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table></div>'


def _highest(values: Iterable[str]) -> str:
    """The best value that not all have."""
    distinct = {value for value in values if value != NOTHING}
    return max(distinct, key=float) if len(distinct) > 1 else NOTHING


def figures_of(runs: Sequence[RunRecord]) -> dict[str, Figure]:
    """By heading: acceptance, speedup, acceptance against training minutes, training curves; each where it has values."""
    made = {
        "Acceptance rate": _bars(runs, {"T = 0": "acceptance_rate_t0", "T = 1": "acceptance_rate_t1"}),
        "Speedup over the strongest plain decoding": _bars(
            runs, {"T = 0": "walltime_speedup_t0", "T = 1": "walltime_speedup_t1"}, level=1.0
        ),
        "Acceptance against training time": _scatter(runs, "train_minutes", "acceptance_rate_t0"),
        "Acceptance while training": _curves(runs),
    }
    return {heading: figure for heading, figure in made.items() if figure is not None}


def _bars(runs: Sequence[RunRecord], metrics: dict[str, str], level: float | None = None) -> Figure | None:
    shown = [run for run in reversed(runs) if any(name in run.metrics for name in metrics.values())]
    if not shown:
        return None
    figure = Figure(figsize=(9, 1.2 + 0.4 * len(shown)), layout="constrained")
    axes = figure.subplots()
    height = 0.8 / len(metrics)
    for index, (label, name) in enumerate(metrics.items()):
        at = [row - (index - (len(metrics) - 1) / 2) * height for row in range(len(shown))]
        values = [run.metrics.get(name, 0.0) for run in shown]
        bars = axes.barh(at, values, 0.9 * height, label=label, color=("#2f6db5", "#f0a35e")[index])
        axes.bar_label(bars, [f"{value:.3g}" if value else "" for value in values], padding=3, fontsize=8)
    axes.set_yticks(range(len(shown)), [run.name for run in shown])
    if level is not None:
        axes.axvline(level, color="#7f7f7f", linewidth=1)
    axes.margins(x=0.08)
    axes.grid(axis="x", alpha=0.3)
    axes.legend(frameon=False, loc="lower right", bbox_to_anchor=(1, 1), ncols=2)  # above: bars may end anywhere
    return figure


def _scatter(runs: Sequence[RunRecord], across: str, up: str) -> Figure | None:
    shown = [run for run in runs if across in run.metrics and up in run.metrics]
    if len(shown) < 2:
        return None
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.scatter([run.metrics[across] for run in shown], [run.metrics[up] for run in shown], color="#2f6db5")
    for run in shown:
        axes.annotate(
            run.name, (run.metrics[across], run.metrics[up]), xytext=(5, 3), textcoords="offset points", fontsize=8
        )
    axes.set_xlabel("minutes of training")
    axes.set_ylabel("acceptance rate, T = 0")
    axes.margins(x=0.15)
    axes.grid(alpha=0.3)
    return figure


def _curves(runs: Sequence[RunRecord]) -> Figure | None:
    shown = [run for run in runs if len(run.curve) > 1][:MAX_CURVES]
    if not shown:
        return None
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.subplots()
    for run in shown:
        steps, values = zip(*run.curve, strict=True)
        axes.plot(steps, values, marker="o", markersize=3, label=run.name)
    axes.set_xlabel("optimiser step")
    axes.set_ylabel("held-out acceptance rate")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=8)
    return figure
