"""`bench.target=random:<shape>`: the benchmark on random weights; needs no corpus and no draft."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from eval.random_bench import run_random_bench
from pipeline.console import result_console
from pipeline.models import default_device
from pipeline.report import bench_table, describe_machine
from pipeline.schema import Config
from pipeline.stage_bench import bench_figures, bench_progress, speedup_figures
from pipeline.store import fingerprint_of, write_json
from pipeline.tracking import open_tracker

NAME = "random_bench"


def run_shapes(config: Config) -> Path:
    """Time the shapes, print the table and write `artifacts/random_bench/<fingerprint>/bench.json`.

    A second run of the same configuration measures again.

    Raises:
        ValueError: other stages were asked for too, or the models do not fit.
    """
    if config.stages != ["bench"]:
        raise ValueError(
            f"bench.target={config.bench.target!r}: random weights are timed only; use stages=[bench] (make bench)"
        )
    bench = replace(config.bench, dtype=config.bench.dtype or config.target.dtype)
    fingerprint = fingerprint_of({"bench": asdict(bench), "runtime": asdict(config.runtime)})
    folder = Path(config.artifacts_dir) / NAME / fingerprint[:12]
    with open_tracker(config) as tracker, tracker.stage(NAME, fingerprint):
        with bench_progress() as on_progress:
            result = run_random_bench(
                bench, device=default_device(), runtime=config.runtime, on_progress=on_progress
            )
        settings = {
            "machine": describe_machine(str(bench.dtype)),
            "target": bench.target,
            "draft": bench.draft,
            "synthetic_acceptance": bench.acceptance,
            "sampler": config.runtime.sampler,
            "max_new_tokens": bench.max_new_tokens,
            "prompt_set": f"random ids, {bench.prompt_tokens} each",
            "num_prompts": bench.num_prompts,
        }
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "bench.json", {"bench": result.rows, "settings": settings})
        for name, figure in speedup_figures(result.rows).items():
            tracker.log_figure(figure, name)
        figures = bench_figures(result.rows).items()
        tracker.log_metrics({name: value for name, value in figures if isinstance(value, float)})
    rows: list[Any] = result.rows
    console = result_console()
    console.print(bench_table(rows))
    console.print(f"random weights of {bench.target} and {bench.draft}: {folder / 'bench.json'}", soft_wrap=True)
    return folder
