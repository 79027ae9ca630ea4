"""The bench stage: what the draft is worth by the clock, on held-out prompts or on a file of prompts."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from matplotlib.figure import Figure
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from transformers import PreTrainedModel

from eval.bench import run_bench as measure_speed
from eval.plots import speedup_figure
from pipeline.bench_prompts import PromptSet, file_prompts, held_out_prompts, prompt_room
from pipeline.console import result_console
from pipeline.context import StageContext, load_target
from pipeline.drafter_table import drafter_figures, drafter_table, has_drafters, short_way
from pipeline.drafts import load_bench_drafts, training_minutes
from pipeline.held_out import corpus_parts
from pipeline.models import load_tokenizer
from pipeline.report import bench_table, describe_machine
from pipeline.store import write_json


def run_bench(context: StageContext) -> dict[str, object]:
    """Write `bench.json`: `bench` rows and the `settings` that they were measured with.

    Where there are trees, Medusa heads or n-grams among them, what proposes is compared in a table of its own.
    """
    config = context.config
    dtype = config.bench.dtype or config.target.dtype
    target = load_target(context, dtype=dtype)
    chosen = choose_prompts(context, target)
    drafts, minutes = load_bench_drafts(context, dtype=dtype), training_minutes(context)
    with bench_progress() as on_progress:
        result = measure_speed(
            target, drafts, chosen.prompts, config.bench, runtime=config.runtime, on_progress=on_progress
        )
    settings = {
        "machine": describe_machine(dtype),
        "sampler": config.runtime.sampler,
        "max_new_tokens": config.bench.max_new_tokens,
        "training_minutes": minutes,
        **chosen.describe(),
    }
    write_json(context.work_dir / "bench.json", {"bench": result.rows, "settings": settings})
    for name, figure in speedup_figures(result.rows).items():
        context.tracker.log_figure(figure, name)
    rows: list[Any] = result.rows
    if "export" not in config.stages:  # which shows the table itself, at the end of the run
        result_console().print(bench_table(rows))
    figures = bench_figures(rows)
    if has_drafters(rows):
        result_console().print(drafter_table(rows, minutes))
        figures |= drafter_figures(rows, minutes)
    return figures


def choose_prompts(context: StageContext, target: PreTrainedModel) -> PromptSet:
    """The prompts of `bench.prompts`, or held-out ones, that leave room for the answer.

    Raises:
        ValueError: no prompt can be used.
    """
    config, bench = context.config, context.config.bench
    max_tokens = prompt_room([target], num_new_tokens=bench.max_new_tokens)
    if bench.prompts is None:
        rows = corpus_parts(context).test.select_columns(["prompt_id", "prompt_token_ids"])
        return held_out_prompts(rows, num_prompts=bench.num_prompts, max_tokens=max_tokens)
    tokenizer = load_tokenizer(context.target.path, config.target.trust_remote_code)
    return file_prompts(
        bench.prompts, tokenizer, chat=config.target.chat, num_prompts=bench.num_prompts, max_tokens=max_tokens
    )


def speedup_figures(rows: list[dict[str, Any]]) -> dict[str, Figure]:
    """By file name: speedup against gamma, for each temperature at which a draft was measured (none beside plain decoding)."""
    drafted = [row for row in rows if row["draft"] != "none"]
    return {
        f"speedup_t{temperature:g}.png": speedup_figure(
            rows, temperature=temperature, batch=min(row["batch"] for row in drafted if row["temperature"] == temperature)
        )
        for temperature in dict.fromkeys(row["temperature"] for row in drafted)
    }


def bench_figures(rows: list[dict[str, Any]]) -> dict[str, object]:
    """The speedups of native rows by name, as they are logged."""
    figures: dict[str, object] = {}
    for row in rows:
        if row["backend"] == "native" and row["draft"] != "none":
            name = f"walltime_speedup_{row['draft']}_t{row['temperature']:g}_{short_way(row)}_b{row['batch']}"
            figures[name] = row["walltime_speedup"]
    return figures


@contextmanager
def bench_progress() -> Iterator[Callable[[int, int], None]]:
    """A bar on a terminal, nothing elsewhere: the runner says when a stage starts and ends."""
    columns = (
        TextColumn("bench"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, transient=True, disable=not sys.stdout.isatty()) as bar:
        task = bar.add_task("bench", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
