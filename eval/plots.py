"""Figures of acceptance and speed. They are returned, not saved: where they go is the caller's affair."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from eval.bench_conditions import tree_name

Rows = Sequence[Mapping[str, Any]]
COLORS = {"none": "#7f7f7f", "undistilled": "#f0a35e", "distilled": "#2f6db5"}
OTHER_COLORS = ("#5a9e6f", "#a05195", "#8c564b", "#17becf")


def acceptance_figure(rows: Rows) -> Figure:
    """Bars of `acceptance_rate` with intervals, drafts side by side, by temperature and sampler.

    Args:
        rows: {draft, temperature, sampler, value, low, high}. At temperature 0 samplers agree
            and are shown once.

    Raises:
        ValueError: no rows.
    """
    if not rows:
        raise ValueError("acceptance_figure: no rows to draw")
    groups = list(dict.fromkeys(_group_name(row) for row in rows))
    drafts = list(dict.fromkeys(str(row["draft"]) for row in rows))
    figure, axes = figure_with_axes(width=2.5 + 1.3 * len(groups))
    width = 0.8 / len(drafts)
    for index, draft in enumerate(drafts):
        chosen = {_group_name(row): row for row in rows if row["draft"] == draft}
        at = [groups.index(name) + (index - (len(drafts) - 1) / 2) * width for name in chosen]
        values = [float(row["value"]) for row in chosen.values()]
        bars = axes.bar(
            at,
            values,
            0.92 * width,
            color=line_color(draft, index),
            label=draft,
            yerr=interval_errors(chosen.values()),
            capsize=3,
        )
        axes.bar_label(bars, [f"{value:.2f}" for value in values], padding=3, fontsize=8)
    axes.set_xticks(range(len(groups)), groups)
    axes.set_ylim(0, 1.08)
    axes.set_ylabel("acceptance rate")
    axes.set_title("Share of the target's distribution that the draft covers (95% interval)", fontsize=10)
    axes.legend(frameon=False)
    return figure


def speedup_figure(rows: Rows, *, temperature: float, batch: int | None = None) -> Figure:
    """`walltime_speedup` against gamma with intervals, one line per backend and draft; predictions dashed.

    gamma=auto is a dotted level, a tree a point at its depth. A synthetic acceptance is said in the title.

    Args:
        batch: None takes the smallest that was measured.

    Raises:
        ValueError: no speculative rows at this temperature and batch.
    """
    batch = min((int(r["batch"]) for r in rows), default=1) if batch is None else batch
    chosen = [
        r for r in rows if r["draft"] != "none" and r["temperature"] == temperature and r["batch"] == batch
    ]
    if not chosen:
        raise ValueError(f"speedup_figure: no speculative rows at temperature={temperature}, batch={batch}")
    figure, axes = figure_with_axes(width=6.4)
    lines = list(dict.fromkeys((str(row["backend"]), str(row["draft"])) for row in chosen))
    for index, (backend, draft) in enumerate(lines):
        line = [row for row in chosen if (row["backend"], row["draft"]) == (backend, draft)]
        color = line_color(draft if backend == "native" else "", index)
        _draw_speedups(axes, line, label=f"{draft} ({backend})", color=color)
    axes.axhline(1.0, color=COLORS["none"], linewidth=1)
    axes.annotate(
        "plain decoding", (axes.get_xlim()[0], 1.0), xytext=(4, 3), textcoords="offset points", fontsize=8
    )
    axes.set_xticks(sorted({int(row["gamma"]) for row in chosen}))
    axes.set_xlabel("gamma (tokens proposed per round)")
    axes.set_ylabel("walltime speedup")
    axes.set_title(_speedup_title(chosen, temperature, batch), fontsize=10)
    axes.legend(frameon=False, fontsize=8)
    return figure


def figure_with_axes(width: float, height: float = 4.0) -> tuple[Figure, Axes]:
    """A figure of its own, not pyplot's: nothing to close, no backend to choose."""
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    return figure, axes


def _draw_speedups(axes: Axes, rows: Rows, *, label: str, color: str) -> None:
    """One backend and draft: measured with intervals, predicted, the level of gamma=auto, and trees."""
    chains = [r for r in rows if r.get("gamma_policy") != "auto" and r.get("tree") is None]
    line = sorted(chains, key=lambda r: int(r["gamma"]))
    gammas = [int(row["gamma"]) for row in line]
    speedups = [float(row["walltime_speedup"]) for row in line]
    errors = interval_errors(line, "walltime_speedup")
    if line:
        axes.errorbar(gammas, speedups, yerr=errors, marker="o", capsize=3, color=color, label=label)
    predicted = [
        (g, float(r["predicted_speedup"]))
        for g, r in zip(gammas, line, strict=True)
        if r["predicted_speedup"]
    ]
    if predicted:
        xs, ys = zip(*predicted, strict=True)
        axes.plot(xs, ys, "--", color=color, alpha=0.6, label=f"{label}, predicted")
    for row in rows:
        if row.get("gamma_policy") == "auto":
            level = float(row["walltime_speedup"])
            axes.axhline(level, linestyle=":", color=color, label=f"{label}, gamma=auto")
        elif row.get("tree") is not None:
            at, errors = float(row["walltime_speedup"]), interval_errors([row], "walltime_speedup")
            name = f"{label}, tree {tree_name(row['tree'])}"
            axes.errorbar([int(row["gamma"])], [at], yerr=errors, fmt="^", capsize=3, color=color, label=name)


def _speedup_title(rows: Rows, temperature: float, batch: int) -> str:
    title = f"Speed over the strongest plain decoding, temperature {temperature:g}, batch {batch}"
    rates = sorted({float(row["synthetic_acceptance"]) for row in rows if "synthetic_acceptance" in row})
    return f"{title}\nsynthetic acceptance {', '.join(f'{rate:g}' for rate in rates)}" if rates else title


def _group_name(row: Mapping[str, Any]) -> str:
    return "T = 0" if row["temperature"] == 0 else f"T = {row['temperature']:g}\n{row['sampler']}"


def interval_errors(rows: Any, value: str = "value") -> list[list[float]]:
    """Distances from the value to the ends of its interval, as matplotlib wants them."""
    rows = list(rows)
    below = [max(float(r[value]) - float(r["low"]), 0.0) for r in rows]
    above = [max(float(r["high"]) - float(r[value]), 0.0) for r in rows]
    return [below, above]


def line_color(draft: str, index: int) -> str:
    return COLORS.get(draft, OTHER_COLORS[index % len(OTHER_COLORS)])
