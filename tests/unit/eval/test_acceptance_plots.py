"""The acceptance figures show the rows' numbers."""

import io
from typing import Any

import pytest

from eval.acceptance_plots import calibration_figure, domain_figure, range_figure, tau_figure


def interval(value: float) -> dict[str, float]:
    return {"value": value, "low": value - 0.05, "high": value + 0.02}


def entry(draft: str, shift: float) -> dict[str, Any]:
    ranges = [
        {"start": start, "end": end, "value": value + shift, "mean_measure": (start + end) / 2, "num_tokens": num}
        for start, end, value, num in ((0, 1, 0.2, 10), (1, 8, 0.4, 30))
    ]
    confidence = [{**r, "start": r["start"] / 8, "end": r["end"] / 8, "mean_measure": r["mean_measure"] / 8} for r in ranges]
    return {
        "draft": draft, "by_domain": {"code": interval(0.5 + shift), "chat": interval(0.3 + shift)},
        "by_position": ranges, "by_entropy": ranges, "by_confidence": confidence,
        "tau": {"1": interval(1.2 + shift), "2": interval(1.4 + shift)},
    }  # fmt: skip


BOTH = [entry("undistilled", 0.0), entry("distilled", 0.2)]


def test_domains_are_bars_the_best_on_top() -> None:
    (axes,) = domain_figure(BOTH, title="T").axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["chat", "code"]
    bars = [c for c in axes.containers if hasattr(c, "patches")]
    assert [[round(bar.get_width(), 6) for bar in c.patches] for c in bars] == [[0.3, 0.5], [0.5, 0.7]]
    assert axes.get_title() == "T"


def test_positions_and_entropies_are_lines_over_their_ranges() -> None:
    for measure, labels in (("by_position", ["0", "1-7"]), ("by_entropy", ["0-1", "1-8"])):
        (axes,) = range_figure(BOTH, measure, xlabel="x", title="t").axes
        assert [label.get_text() for label in axes.get_xticklabels()] == labels
        assert [list(line.get_ydata()) for line in axes.lines] == [[0.2, 0.4], pytest.approx([0.4, 0.6])]


def test_ranges_that_one_draft_lacks_keep_their_place() -> None:
    first = {**BOTH[0], "by_position": BOTH[0]["by_position"][:1]}
    second = {**BOTH[1], "by_position": BOTH[1]["by_position"][1:]}
    (axes,) = range_figure([first, second], "by_position", xlabel="x", title="t").axes
    assert [list(line.get_xdata()) for line in axes.lines] == [[0], [1]]


def test_calibration_is_acceptance_over_mean_confidence_with_shares() -> None:
    figure = calibration_figure(BOTH)
    axes, shares = figure.axes
    lines = {line.get_label(): line.get_xydata().tolist() for line in axes.lines}
    assert lines["calibrated"] == [[0, 0], [1, 1]]
    assert lines["distilled"] == [pytest.approx([1 / 16, 0.4]), pytest.approx([9 / 16, 0.6])]
    assert [bar.get_height() for bar in shares.containers[0].patches] == pytest.approx([0.25, 0.75])
    figure.savefig(io.BytesIO())


def test_tau_is_drawn_over_gamma() -> None:
    (axes,) = tau_figure(BOTH).axes
    assert axes.containers[1].lines[0].get_xydata().tolist() == [pytest.approx([1, 1.4]), pytest.approx([2, 1.6])]


def test_nothing_to_draw_is_refused() -> None:
    for draw in (domain_figure, calibration_figure, tau_figure):
        with pytest.raises(ValueError, match="no drafts"):
            draw([])
    with pytest.raises(ValueError, match="no drafts"):
        range_figure([], "by_position", xlabel="x", title="t")


def test_very_many_domains_of_any_name_can_be_drawn() -> None:
    """A failure here would end the tracking of the whole run: an image may have 65536 pixels, and `$` begins a formula."""
    many = {**BOTH[0], "by_domain": {f"cost $\\frac$ {i}": interval(i / 2000) for i in range(2000)}}
    figure = domain_figure([many], title="T")
    (axes,) = figure.axes
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert len(names) == 40 and names[0].endswith(" 0") and names[-1].endswith(" 1999")
    assert axes.get_title() == "T\nthe 20 lowest and the 20 highest of 2000"
    figure.savefig(io.BytesIO())
