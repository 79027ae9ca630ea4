"""The figures show the rows' numbers."""

import io
from typing import Any

import pytest

from eval.plots import acceptance_figure, speedup_figure


def acceptance_rows() -> list[dict[str, Any]]:
    return [
        {"draft": d, "temperature": t, "sampler": s, "value": v, "low": v - 0.02, "high": v + 0.03}
        for d, base in (("undistilled", 0.1), ("distilled", 0.5))
        for t, s, v in (
            (0.0, "probabilistic", base),
            (0.0, "greedy", base),
            (1.0, "probabilistic", base + 0.1),
            (1.0, "greedy", base + 0.2),
        )
    ]


def bench_rows() -> list[dict[str, Any]]:
    rows = [
        {
            "backend": "native", "draft": draft, "temperature": temperature, "gamma": gamma, "batch": 1,
            "walltime_speedup": 1 + gamma * gain, "low": 1 + gamma * gain - 0.1, "high": 1 + gamma * gain + 0.1,
            "predicted_speedup": 1.05 + gamma * gain,
        }
        for temperature in (0.0, 1.0)
        for draft, gain in (("undistilled", -0.1), ("distilled", 0.2))
        for gamma in (3, 1, 2)
    ]  # fmt: skip
    return [*rows, {**rows[0], "draft": "none", "gamma": 0, "walltime_speedup": 1.0}]


def test_acceptance_bars_have_the_values_side_by_side() -> None:
    figure = acceptance_figure(acceptance_rows())
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_xticklabels()] == [
        "T = 0",
        "T = 1\nprobabilistic",
        "T = 1\ngreedy",
    ]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["undistilled", "distilled"]
    heights = [
        [bar.get_height() for bar in group.patches] for group in axes.containers if hasattr(group, "patches")
    ]
    assert heights == [pytest.approx([0.1, 0.2, 0.3]), pytest.approx([0.5, 0.6, 0.7])]
    figure.savefig(io.BytesIO())


def test_speedup_lines_are_sorted_by_gamma_with_predictions() -> None:
    figure = speedup_figure(bench_rows(), temperature=0.0)
    (axes,) = figure.axes
    lines = {container.get_label(): container.lines[0].get_xydata().tolist() for container in axes.containers}
    assert lines["distilled (native)"] == [pytest.approx([g, 1 + 0.2 * g]) for g in (1, 2, 3)]
    predicted = {line.get_label(): line.get_ydata() for line in axes.lines}
    assert list(predicted["distilled (native), predicted"]) == pytest.approx([1.25, 1.45, 1.65])
    assert "none (native)" not in lines
    assert "batch 1" in axes.get_title()
    figure.savefig(io.BytesIO())


def test_missing_predictions_are_left_out() -> None:
    rows = [{**row, "predicted_speedup": None, "backend": "hf_assisted"} for row in bench_rows()]
    (axes,) = speedup_figure(rows, temperature=1.0).axes
    assert not [line for line in axes.lines if "predicted" in str(line.get_label())]


def test_gamma_auto_is_a_level_and_a_synthetic_acceptance_is_in_the_title() -> None:
    automatic = {
        **bench_rows()[3],
        "gamma_policy": "auto",
        "walltime_speedup": 1.55,
        "synthetic_acceptance": 0.7,
    }
    (axes,) = speedup_figure([*bench_rows(), automatic], temperature=0.0).axes
    levels = {line.get_label(): list(line.get_ydata()) for line in axes.lines}
    assert levels["distilled (native), gamma=auto"] == [1.55, 1.55]
    lines = {container.get_label(): container.lines[0].get_xydata() for container in axes.containers}
    assert len(lines["distilled (native)"]) == 3
    assert "synthetic acceptance 0.7" in axes.get_title()
    assert "synthetic" not in speedup_figure(bench_rows(), temperature=0.0).axes[0].get_title()


def test_trees_are_points_and_no_part_of_the_line() -> None:
    trees = [
        {**bench_rows()[3], "tree": tree, "gamma": 3, "walltime_speedup": speedup, "low": speedup, "high": speedup}
        for tree, speedup in (("3x2x1", 1.7), ([-1, -1, 0, 2], 1.8))
    ]
    (axes,) = speedup_figure([*bench_rows(), *trees], temperature=0.0).axes
    points = {container.get_label(): container.lines[0].get_xydata().tolist() for container in axes.containers}
    assert len(points["distilled (native)"]) == 3
    assert points["distilled (native), tree 3x2x1"] == [[3, 1.7]]
    assert points["distilled (native), tree 4nodes3deep"] == [[3, 1.8]]
    speedup_figure(trees, temperature=0.0)


def test_nothing_to_draw_is_refused() -> None:
    with pytest.raises(ValueError, match="no rows"):
        acceptance_figure([])
    with pytest.raises(ValueError, match="no speculative rows at temperature=0.5"):
        speedup_figure(bench_rows(), temperature=0.5)
