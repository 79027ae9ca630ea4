"""A search's rounds as a table and as a plot of acceptance against cost."""

from typing import Any

from matplotlib.figure import Figure

from pipeline.halving import Rung
from pipeline.markdown import table_lines
from pipeline.search_score import Score, pareto_front

Rungs = list[Rung[Score]]
_COLORS = ("#9db8d9", "#2f6db5", "#17365c", "#f0a35e", "#a05195")


def as_dict(rungs: Rungs) -> list[dict[str, Any]]:
    """What `search.json` holds: the rounds, each with its candidates best first."""
    return [
        {
            "minutes": rung.budget,
            "pareto_front": pareto_front(rung.results),
            "candidates": [{"name": name, **vars(score)} for name, score in rung.results.items()],
        }
        for rung in rungs
    ]


def markdown_table(rungs: Rungs) -> str:
    """The last round first; candidates that are on the round's Pareto front have a star."""
    headings = ("minutes", "candidate", "predicted speedup", "gamma", "tau", "alpha", "draft ms", "cost ratio", "steps")
    rows = []
    for rung in reversed(rungs):
        front = pareto_front(rung.results)
        for name, score in rung.results.items():
            rows.append((
                f"{rung.budget:g}",
                name + (" *" if name in front else ""),
                f"{score.speedup:.3f}",
                str(score.gamma),
                f"{score.tau:.2f}",
                f"{score.acceptance_rate:.3f}",
                f"{score.draft_ms:.2f}",
                f"{score.cost_ratio:.3f}",
                str(score.num_steps),
            ))
    note = "* no other candidate of the round has a higher alpha without a dearer draft step"
    return "\n".join([*table_lines(headings, rows), "", note]) + "\n"


def pareto_figure(rungs: Rungs, *, title: str) -> Figure:
    """alpha against the time of a draft step, one colour per round, a line up from round to round. Labels: the predicted speedup after
    a candidate's last round. The dashed line is the first round's Pareto front."""
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    first = rungs[0].results
    front = [first[name] for name in pareto_front(first)]
    axes.step(
        [score.draft_ms for score in front],
        [score.acceptance_rate for score in front],
        where="post",
        color="#7f7f7f",
        linestyle="--",
        linewidth=1,
    )
    for index, rung in enumerate(rungs):
        results = rung.results.values()
        axes.scatter(
            [score.draft_ms for score in results],
            [score.acceptance_rate for score in results],
            color=_COLORS[index % len(_COLORS)],
            label=f"{rung.budget:g} min",
            zorder=3,
        )
    for name in first:
        scores = [rung.results[name] for rung in rungs if name in rung.results]
        score = scores[-1]
        places = [one.draft_ms for one in scores], [one.acceptance_rate for one in scores]
        axes.plot(*places, color="#7f7f7f", linewidth=0.8, zorder=1)
        axes.annotate(
            f"{name}\n{score.speedup:.2f}x", (score.draft_ms, score.acceptance_rate), xytext=(6, -4),
            textcoords="offset points", fontsize=8,
        )  # fmt: skip
    axes.set_xlabel("draft step (ms)")
    axes.set_ylabel("acceptance rate")
    axes.set_title(title, fontsize=10)
    axes.margins(0.15)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    return figure
