"""The benchmark: plain decoding against the drafts, on the same prompts, in alternation inside one process.

A speedup is stated against the strongest plain decoding of the same run, temperature and batch size. At
temperature 0 the tokens are checked too (see `eval.bench_check`).
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from transformers import PreTrainedModel

from eval.bench_check import TokenChecker
from eval.bench_conditions import NGRAM, NO_DRAFT, BackendFactory, conditions_at
from eval.bench_measure import Measurement, measure
from eval.bench_rows import Row, bench_row, strongest_baseline
from eval.bench_text import add_acceptance_from_text
from eval.config import BenchConfig
from eval.teacher_forcing import Draft
from specdec_runtime.config import DecoderConfig


@dataclass
class BenchResult:
    """`rows`: one per condition, JSON-able, with the report's keys. `measurements`: what they came from."""

    rows: list[Row] = field(default_factory=list)
    measurements: list[Measurement] = field(default_factory=list)


def run_bench(
    target: PreTrainedModel,
    drafts: Mapping[str, Draft],
    prompts: Sequence[Sequence[int]],
    config: BenchConfig,
    *,
    runtime: DecoderConfig | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> BenchResult:
    """Runs all conditions on the first `config.num_prompts` prompts.

    Args:
        drafts: by name, `undistilled` and `distilled` for instance; empty compares the baselines alone.
        runtime: sampler and the like; gamma, batch size and width are set by the conditions.
        on_progress: called with (groups done, groups in all) after each group of prompts.

    Raises:
        ValueError: no prompts, a draft that is called `none` or `ngram`, or what a backend refuses.
    """
    prompts = list(prompts)[: config.num_prompts]
    if not prompts:
        raise ValueError("bench: no prompts were given")
    for name, meaning in ((NO_DRAFT, "plain decoding"), (NGRAM, "proposals looked up in the text")):
        if name in drafts:
            raise ValueError(f"bench: a draft cannot be called '{name}', which stands for {meaning}")
    factory = BackendFactory(target, drafts, runtime or DecoderConfig())
    settings = [
        conditions_at(config, drafts, temperature=temperature, batch=batch)
        for temperature in dict.fromkeys(config.temperatures)
        for batch in dict.fromkeys(config.batch_sizes)
    ]
    total = sum(len(conditions) * -(-len(prompts) // conditions[0].batch) for conditions in settings)
    num_done = 0

    def advance(num_groups: int) -> None:
        nonlocal num_done
        num_done += num_groups
        if on_progress is not None:
            on_progress(num_done, total)

    started, result = time.perf_counter(), BenchResult()
    for index, conditions in enumerate(settings):
        deadline_s = None
        if config.max_minutes is not None:
            # Every setting gets its share; what an earlier one left over, the later ones may use.
            deadline_s = started + 60 * config.max_minutes * (index + 1) / len(settings)
        measurements = measure(
            factory, conditions, prompts, config, deadline_s=deadline_s, on_progress=advance
        )
        baseline = strongest_baseline(measurements)
        checker = TokenChecker(factory, prompts, config, measurements)
        rows: list[Row] = []
        for measurement in measurements:
            row = bench_row(measurement, baseline, num_bootstrap=config.num_bootstrap, seed=config.seed)
            if factory.is_synthetic(measurement.condition):
                row["synthetic_acceptance"] = factory.runtime.synthetic_acceptance
            row["draft_memory_mb"] = factory.draft_memory_mb(measurement.condition)
            rows.append({**row, **checker.check(measurement)})
        if factory.runtime.acceptance != "synthetic":
            add_acceptance_from_text(rows, measurements, target, drafts, prompts, sampler=factory.runtime.sampler)
        result.rows.extend(rows)
        result.measurements.extend(measurements)
    return result
