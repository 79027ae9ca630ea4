"""Figures of what acceptance hangs on: domain, position, and the draft's own confidence."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from eval.plots import figure_with_axes, interval_errors, line_color

Entries = Sequence[Mapping[str, Any]]
MAX_DOMAINS = 40


def domain_figure(breakdowns: Entries, *, title: str = "") -> Figure:
    """Horizontal bars of `acceptance_rate` by domain with intervals, drafts side by side, the best domain on top; of very many
    domains the ends.

    Args:
        breakdowns: one per draft, of one temperature and sampler, with `draft` and `by_domain`.

    Raises:
        ValueError: nothing to draw.
    """
    if not breakdowns:
        raise ValueError("domain_figure: no drafts to draw")
    last = breakdowns[-1]["by_domain"]
    domains = sorted({d for entry in breakdowns for d in entry["by_domain"]}, key=lambda d: last.get(d, {}).get("value", 0))
    title = title or "Acceptance by domain (95% interval)"
    if len(domains) > MAX_DOMAINS:
        title += f"\nthe {MAX_DOMAINS // 2} lowest and the {MAX_DOMAINS // 2} highest of {len(domains)}"
        domains = [*domains[: MAX_DOMAINS // 2], *domains[-(MAX_DOMAINS // 2) :]]
    figure, axes = figure_with_axes(width=6.4, height=1.4 + 0.28 * len(domains) * len(breakdowns))
    height = 0.8 / len(breakdowns)
    for index, entry in enumerate(breakdowns):
        chosen = [d for d in domains if d in entry["by_domain"]]
        values = [entry["by_domain"][d] for d in chosen]
        at = [domains.index(d) + (index - (len(breakdowns) - 1) / 2) * height for d in chosen]
        bars = axes.barh(
            at, [v["value"] for v in values], 0.9 * height, xerr=interval_errors(values), capsize=2,
            color=line_color(str(entry["draft"]), index), label=str(entry["draft"]),
        )  # fmt: skip
        axes.bar_label(bars, [f"{v['value']:.2f}" for v in values], padding=4, fontsize=8)
    axes.set_yticks(range(len(domains)), [name[:32] for name in domains], parse_math=False)  # names are the user's
    axes.set_xlim(0, 1.05)
    axes.set_xlabel("acceptance rate")
    axes.grid(axis="x", alpha=0.3)
    axes.grid(visible=False, axis="y")
    axes.set_title(title, fontsize=10)
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    return figure


def range_figure(breakdowns: Entries, measure: str, *, xlabel: str, title: str) -> Figure:
    """Acceptance over `by_position`, `by_entropy` or `by_confidence`, one line per draft; ranges on the axis.

    Raises:
        ValueError: nothing to draw.
    """
    if not breakdowns:
        raise ValueError(f"range_figure: no drafts to draw {measure} of")
    figure, axes = figure_with_axes(width=6.4)
    labels = list(dict.fromkeys(_label(r, measure) for entry in breakdowns for r in entry[measure]))
    for index, entry in enumerate(breakdowns):
        draft = str(entry["draft"])
        at = [labels.index(_label(r, measure)) for r in entry[measure]]
        axes.plot(at, [r["value"] for r in entry[measure]], marker="o", color=line_color(draft, index), label=draft)
    axes.set_xticks(range(len(labels)), labels)
    axes.set_ylim(0, 1)
    axes.set_xlabel(xlabel)
    axes.set_ylabel("acceptance rate")
    axes.set_title(title, fontsize=10)
    axes.legend(frameon=False, fontsize=8)
    return figure


def calibration_figure(breakdowns: Entries, *, title: str = "") -> Figure:
    """Acceptance against the draft's largest probability, with how many positions there are below.

    On the diagonal the draft's confidence is the chance that the target agrees: `runtime.draft_confidence` then
    stops a round where it says.

    Raises:
        ValueError: nothing to draw.
    """
    if not breakdowns:
        raise ValueError("calibration_figure: no drafts to draw")
    figure, axes = figure_with_axes(width=5.4, height=4.6)
    axes.plot([0, 1], [0, 1], "--", color="#9aa0a6", linewidth=1, label="calibrated")
    shares = axes.twinx()
    for index, entry in enumerate(breakdowns):
        color, ranges = line_color(str(entry["draft"]), index), entry["by_confidence"]
        axes.plot(
            [r["mean_measure"] for r in ranges], [r["value"] for r in ranges], marker="o", color=color,
            label=str(entry["draft"]),
        )  # fmt: skip
        total = sum(r["num_tokens"] for r in ranges)
        shares.bar(
            [(r["start"] + min(r["end"], 1)) / 2 for r in ranges], [r["num_tokens"] / total for r in ranges],
            width=0.09, color=color, alpha=0.15,
        )  # fmt: skip
    shares.set_ylim(0, 3)
    shares.set_yticks([0, 0.5, 1])
    shares.set_ylabel("share of positions", loc="bottom", fontsize=8)
    shares.spines[["top", "right"]].set_visible(False)
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    axes.set_xlabel("the draft's largest probability")
    axes.set_ylabel("acceptance rate")
    axes.set_title(title or "Calibration of the draft's confidence", fontsize=10)
    axes.legend(frameon=False, fontsize=8, loc="upper left")
    return figure


def tau_figure(rows: Entries, *, title: str = "") -> Figure:
    """Tokens per target forward against gamma, one line per draft, with intervals; rows as of `rounds_row`.

    Raises:
        ValueError: nothing to draw.
    """
    if not rows:
        raise ValueError("tau_figure: no drafts to draw")
    figure, axes = figure_with_axes(width=6.4)
    for index, row in enumerate(rows):
        gammas, values = [int(gamma) for gamma in row["tau"]], list(row["tau"].values())
        axes.errorbar(
            gammas, [v["value"] for v in values], yerr=interval_errors(values), marker="o", capsize=3,
            color=line_color(str(row["draft"]), index), label=str(row["draft"]),
        )  # fmt: skip
    axes.axhline(1.0, color="#7f7f7f", linewidth=1)
    axes.set_xticks([int(gamma) for gamma in rows[0]["tau"]])
    axes.set_xlabel("gamma (tokens proposed per round)")
    axes.set_ylabel("tokens per target forward")
    axes.set_title(title or "Tokens per target forward", fontsize=10)
    axes.legend(frameon=False, fontsize=8)
    return figure


def _label(entry: Mapping[str, Any], measure: str) -> str:
    """A range as text; the last one of an open measure has no end worth saying."""
    if measure == "by_position":
        first, last = int(entry["start"]), int(entry["end"]) - 1
        return str(first) if first == last else f"{first}-{last}"
    return f"{entry['start']:g}-{entry['end']:.3g}"
