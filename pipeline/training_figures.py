"""The curve of a training: held-out acceptance over optimiser steps."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from pipeline.tracker import Tracker


def log_training_curve(tracker: Tracker, curve: Sequence[tuple[int, float]]) -> None:
    """Log (step, held-out acceptance_rate) pairs as a figure; the single values were logged while training."""
    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.add_subplot()
    axes.plot([step for step, _ in curve], [acceptance for _, acceptance in curve], marker="o", markersize=3)
    axes.set_xlabel("optimiser step")
    axes.set_ylabel("held-out acceptance_rate")
    axes.set_ylim(0, 1)
    axes.grid(alpha=0.3)
    tracker.log_figure(figure, "training_curve.png")
