"""The plots of a corpus report."""

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from pipeline.corpus.report_counts import Group, Shares, Statistics

_COLOUR, _CUT_COLOUR = "#3b6ea5", "#d08770"
_MAX_BARS = 20
_MAX_LABEL = 40
_NUM_BINS = 50


def corpus_figures(found: Statistics) -> dict[str, Figure]:
    """Figures by file stem: one for each way in which rows are grouped, and one for each distribution."""
    figures = {
        f"corpus_{kind.replace(' ', '_')}": _group_figure(kind, groups) for kind, groups in found.groups.items()
    }
    figures["corpus_prompt_length"] = _length_figure(found.prompt_lengths, "prompt length (tokens)")
    figures["corpus_response_length"] = _length_figure(found.response_lengths, "response length (tokens)")
    figures["corpus_duplicates"] = _copies_figure(found.copies)
    if found.mass.num:
        label = f"probability of the {found.topk} stored candidates together"
        figures["corpus_topk_mass"] = _share_figure(found.mass, label, "response tokens", log=True)
    if found.variety.num:
        label = "different runs of four tokens / all runs"
        figures["corpus_variety"] = _share_figure(found.variety, label, "responses")
    return figures


def _axes(height_in: float = 2.6) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(6.4, height_in), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _group_figure(kind: str, groups: Mapping[str, Group]) -> Figure:
    """Rows per value, the largest on top; those that were cut by their length in another colour."""
    ranked = sorted(groups.items(), key=lambda item: -item[1].num_rows)
    shown, rest = ranked[:_MAX_BARS], ranked[_MAX_BARS:]
    if rest:
        others = Group(
            sum(group.num_rows for _, group in rest), 0, sum(group.num_cut for _, group in rest)
        )
        shown = [*shown, (f"{len(rest)} others", others)]
    shown = shown[::-1]
    figure, axes = _axes(1.1 + 0.26 * len(shown))
    # "$" would start a formula.
    names = [_shortened(name).replace("$", r"\$") for name, _ in shown]
    places = range(len(shown))
    ended = [group.num_rows - group.num_cut for _, group in shown]
    cut = [group.num_cut for _, group in shown]
    axes.barh(places, ended, color=_COLOUR, label="ended by the target")
    axes.barh(places, cut, left=ended, color=_CUT_COLOUR, label="cut at max_new_tokens")
    axes.set_yticks(list(places), names)
    axes.set_xlabel("rows")
    figure.legend(loc="outside upper right", ncols=2, frameon=False, fontsize="small")
    figure.suptitle(kind, x=0.02, ha="left", fontsize="medium")
    return figure


def _length_figure(lengths: Counter[int], label: str) -> Figure:
    figure, axes = _axes()
    longest = max(lengths, default=1)
    width = longest // _NUM_BINS + 1  # whole tokens: bins of unequal numbers of lengths would look like a comb
    edges = list(range(0, longest + width + 1, width))
    axes.hist(list(lengths), bins=edges, weights=list(lengths.values()), color=_COLOUR)
    total = sum(lengths.values())
    if total:
        mean = sum(length * count for length, count in lengths.items()) / total
        axes.axvline(mean, color="black", linewidth=1, linestyle="--", label=f"mean {mean:.1f}")
        axes.legend(frameon=False, fontsize="small")
    axes.set_xlabel(label)
    axes.set_ylabel("rows")
    return figure


def _copies_figure(copies: Sequence[int]) -> Figure:
    figure, axes = _axes()
    names = [*map(str, range(1, len(copies))), f"{len(copies)} or more"]
    bars = axes.bar(names, copies, color=_COLOUR, log=True)
    axes.bar_label(bars, [f"{num:,}" if num else "" for num in copies], fontsize="small")
    axes.set_xlabel("times that the same answer occurs")
    axes.set_ylabel("rows")
    return figure


def _share_figure(shares: Shares, xlabel: str, ylabel: str, *, log: bool = False) -> Figure:
    figure, axes = _axes()
    counts = shares.counts.reshape(_NUM_BINS, -1).sum(axis=1)
    axes.bar((np.arange(_NUM_BINS) + 0.5) / _NUM_BINS, counts, width=1 / _NUM_BINS, color=_COLOUR, log=log)
    axes.axvline(shares.mean, color="black", linewidth=1, linestyle="--", label=f"mean {shares.mean:.4f}")
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(PercentFormatter(1))
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.legend(frameon=False, fontsize="small", loc="upper left")
    return figure


def _shortened(name: str) -> str:
    return name if len(name) <= _MAX_LABEL else name[: _MAX_LABEL - 1] + "…"
