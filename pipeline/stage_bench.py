"""The bench stage: what the draft is worth by the clock, on held-out prompts."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from eval.bench import run_bench as measure_speed
from eval.plots import speedup_figure
from pipeline.context import StageContext
from pipeline.drafts import load_drafts
from pipeline.held_out import corpus_parts
from pipeline.models import load_causal_lm
from pipeline.report import describe_machine
from pipeline.store import write_json


def run_bench(context: StageContext) -> dict[str, object]:
    """Write `bench.json`: `bench` rows and the `settings` that they were measured with."""
    config = context.config
    target = load_causal_lm(context.target.path, dtype=config.target.dtype, trust_remote_code=config.target.trust_remote_code)
    prompts = held_out_prompts(context)
    with _progress() as on_progress:
        result = measure_speed(target, load_drafts(context), prompts, config.bench, runtime=config.runtime, on_progress=on_progress)
    settings = {
        "machine": describe_machine(config.target.dtype),
        "sampler": config.runtime.sampler,
        "max_new_tokens": config.bench.max_new_tokens,
        "num_prompts": min(len(prompts), config.bench.num_prompts),
        "prompt_set": "held-out prompts of the corpus",
    }
    write_json(context.work_dir / "bench.json", {"bench": result.rows, "settings": settings})
    for temperature in config.bench.temperatures:
        context.tracker.log_figure(speedup_figure(result.rows, temperature=temperature), f"speedup_t{temperature:g}.png")
    return bench_figures(result.rows)


def held_out_prompts(context: StageContext) -> list[list[int]]:
    """Distinct prompts of the test part, in the corpus's order, that leave room for the answers."""
    prompts: dict[str, list[int]] = {}
    for row in corpus_parts(context).test.select_columns(["prompt_id", "prompt_token_ids"]):
        prompts.setdefault(row["prompt_id"], list(row["prompt_token_ids"]))
    return list(prompts.values())


def bench_figures(rows: list[dict[str, Any]]) -> dict[str, object]:
    """The speedups of native rows by name, as they are logged."""
    return {f"walltime_speedup_{row['draft']}_t{row['temperature']:g}_g{row['gamma']}_b{row['batch']}": row["walltime_speedup"]
            for row in rows if row["backend"] == "native" and row["draft"] != "none"}


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """A bar on a terminal, nothing elsewhere: the runner says when a stage starts and ends."""
    columns = (TextColumn("bench"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, transient=True, disable=not sys.stdout.isatty()) as bar:
        task = bar.add_task("bench", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
