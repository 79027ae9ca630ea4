"""Spec-Bench (arXiv 2401.07851): a file of prompts by category, as the public leaderboard's table.

`python -m pipeline.spec_bench bench.prompts=question.jsonl [setting=value ...]`. Batch 1, the lowest of
`bench.temperatures`, every draft, gamma and tree that `bench` names, in alternation. Each prompt's times are written when
it is done, so that the same command goes on after it was stopped, by hand or by `bench.max_minutes`.
"""

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from eval.bench_conditions import BackendFactory, Condition, conditions_at
from eval.bench_measure import Measurement, measure
from pipeline.bench_prompts import PromptSet, check_prompt_file, file_prompts, prompt_room
from pipeline.commands import compose_config, run_command
from pipeline.console import result_console
from pipeline.context import StageContext
from pipeline.drafter_table import short_way
from pipeline.drafts import load_bench_drafts
from pipeline.finished import finished_context
from pipeline.models import ModelRef, load_causal_lm, load_tokenizer, resolve_target
from pipeline.report import describe_machine
from pipeline.schema import Config
from pipeline.spec_bench_table import group_of, leaderboard, leaderboard_markdown, leaderboard_table
from pipeline.stage_bench import bench_progress
from pipeline.stages import heads_revision
from pipeline.store import file_revision, fingerprint_of, write_json
from pipeline.tracking import open_tracker

NAME, ROWS = "spec_bench", "rows.jsonl"
#: Settings that say how long to go on, not what is measured: a changed one takes up the same folder.
_BUDGETS = ("max_minutes", "prompts", "num_bootstrap", "num_prompts")
#: Settings that came later, of which the empty ones leave a fingerprint as it was.
_LATER = ("trees", "medusa_heads")


def main(words: Sequence[str]) -> None:
    """Measure the prompts that are not done yet, and print the table of all that are.

    Raises:
        ValueError: no prompts file, or the draft is not trained yet.
    """
    config = compose_config(words)
    if config.bench.prompts is None:
        raise ValueError(
            "bench.prompts=null: no prompts were named; make spec-bench PROMPTS=question.jsonl, or bench.prompts=question.jsonl for "
            "python -m pipeline.spec_bench (Spec-Bench: data/spec_bench/question.jsonl of its repository)"
        )
    check_prompt_file(config.bench.prompts)  # before a target is fetched
    run_spec_bench(config)


def run_spec_bench(config: Config) -> Path:
    """`artifacts/spec_bench/<fingerprint>/` with `rows.jsonl`, `spec_bench.json` and `table.md`."""
    reference, dtype = resolve_target(config), config.bench.dtype or config.target.dtype
    with open_tracker(config) as tracker:
        context = finished_context(config, reference, ["corpus", "distill"], work_dir=Path(), tracker=tracker)
        fingerprint = _fingerprint(context)
        folder = Path(config.artifacts_dir) / NAME / fingerprint[:12]
        folder.mkdir(parents=True, exist_ok=True)
        with tracker.stage(NAME, fingerprint):
            target = load_causal_lm(reference.path, dtype, config.target.trust_remote_code)
            chosen = prompts_in_turn(config, reference, target)
            factory = BackendFactory(target, load_bench_drafts(context, dtype=dtype), config.runtime)
            rows = measure_prompts(config, factory, chosen, folder / ROWS)
            result = leaderboard(rows, num_bootstrap=config.bench.num_bootstrap, seed=config.bench.seed)
            settings = {
                "machine": describe_machine(dtype), "max_new_tokens": config.bench.max_new_tokens,
                "sampler": config.runtime.sampler, "temperature": min(config.bench.temperatures), "batch": 1,
                **chosen.describe(), "num_prompts_chosen": len(chosen.prompts), "num_prompts": len(rows),
            }  # fmt: skip
            write_json(folder / "spec_bench.json", {"leaderboard": result, "settings": settings})
            (folder / "table.md").write_text(leaderboard_markdown(result), encoding="utf-8")
            tracker.log_text(leaderboard_markdown(result), "spec_bench.md")
            tracker.log_metrics(
                {f"spec_bench_speedup_{r['draft']}_{short_way(r)}": r["overall"]["speedup"] for r in result if r["gamma"]}
            )
    _show(result, num_done=len(rows), num_chosen=len(chosen.prompts), folder=folder)
    return folder


def _fingerprint(context: StageContext) -> str:
    """Of what is measured: budgets are not in it, the prompts are by their content."""
    config = context.config
    assert config.bench.prompts is not None
    bench = {name: value for name, value in asdict(config.bench).items() if name not in _BUDGETS and (value or name not in _LATER)}
    if config.bench.medusa_heads is not None:
        bench["medusa_heads"] = heads_revision(Path(config.bench.medusa_heads))
    return fingerprint_of(
        {
            "bench": bench,
            "runtime": asdict(config.runtime),
            "target": context.target.revision,
            "distill": context.inputs["distill"].name,
            "prompts": file_revision(prompts) if (prompts := Path(config.bench.prompts)).is_file() else config.bench.prompts,
        }
    )


def _show(result: list[dict[str, Any]], *, num_done: int, num_chosen: int, folder: Path) -> None:
    console = result_console()
    console.print(leaderboard_table(result))
    console.print(f"{num_done} of {num_chosen} prompts, {folder / 'spec_bench.json'}", soft_wrap=True)
    if num_done < num_chosen:
        console.print(f"{num_chosen - num_done} prompts are left: the same command goes on with them")


def prompts_in_turn(config: Config, reference: ModelRef, target: PreTrainedModel) -> PromptSet:
    """`bench.num_prompts` prompts, the leaderboard's groups in turn, so that a part of them is balanced too.

    Raises:
        ValueError: no prompt can be used.
    """
    bench = config.bench
    assert bench.prompts is not None
    every = file_prompts(
        bench.prompts,
        load_tokenizer(reference.path, reference.trust_remote_code),
        chat=config.target.chat,
        num_prompts=sys.maxsize,
        max_tokens=prompt_room([target], num_new_tokens=bench.max_new_tokens),
    )
    by_group: dict[str, list[int]] = {}
    for index, category in enumerate(every.category_of):
        by_group.setdefault(group_of(category), []).append(index)
    in_turn = chain.from_iterable(zip_longest(*by_group.values()))
    order = [index for index in in_turn if index is not None][: bench.num_prompts]
    every.prompts = [every.prompts[i] for i in order]
    every.names = [every.names[i] for i in order]
    every.category_of = [every.category_of[i] for i in order]
    every.categories = dict(Counter(every.category_of))
    return every


def measure_prompts(config: Config, factory: BackendFactory, chosen: PromptSet, path: Path) -> list[dict[str, Any]]:
    """Every prompt that `path` does not have yet, appended to it one by one; all of its rows that were chosen."""
    conditions = conditions_at(config.bench, factory.drafts, temperature=min(config.bench.temperatures), batch=1)
    keys = [f"{n} {fingerprint_of({'ids': p})[:12]}" for n, p in zip(chosen.names, chosen.prompts, strict=True)]
    done, deadline_s, warm_up = _rows_of_file(path, conditions), None, config.bench.num_warmup_prompts
    if config.bench.max_minutes is not None:
        deadline_s = time.perf_counter() + 60 * config.bench.max_minutes
    with bench_progress() as on_progress, path.open("a", encoding="utf-8") as stream:
        for index, (key, prompt) in enumerate(zip(keys, chosen.prompts, strict=True)):
            if key not in done and (deadline_s is None or time.perf_counter() < deadline_s):
                # The order of the conditions turns from prompt to prompt; the first prompt warms up.
                shift = index % len(conditions)
                order = [*conditions[shift:], *conditions[:shift]][:: 1 if index % 2 == 0 else -1]
                measured = measure(factory, order, [prompt], replace(config.bench, num_warmup_prompts=warm_up))
                warm_up = 0
                done[key] = _row(key, chosen.category_of[index], conditions, measured)
                stream.write(json.dumps(done[key]) + "\n")
                stream.flush()
                os.fsync(stream.fileno())
            on_progress(index + 1, len(chosen.prompts))
    return [done[key] for key in keys if key in done]


def _rows_of_file(path: Path, conditions: Sequence[Condition]) -> dict[str, dict[str, Any]]:
    """Rows by key. A line that a kill cut short is cut off the file, so that the next one starts on its own."""
    if not path.is_file():
        return {}
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        path.write_text("".join(lines[:-1]), encoding="utf-8")
        lines = lines[:-1]
    rows = [json.loads(line) for line in lines]
    return {row["key"]: row for row in rows if len(row["conditions"]) == len(conditions)}


def _row(
    key: str, category: str, conditions: Sequence[Condition], measured: Sequence[Measurement]
) -> dict[str, Any]:
    """One line of `rows.jsonl`: the prompt's seconds, tokens and target forwards under each condition."""
    of = {measurement.condition: measurement for measurement in measured}
    entries = []
    for condition in conditions:
        stats = of[condition].stats
        entries.append(
            {
                "backend": condition.backend,
                "draft": condition.draft,
                "gamma": condition.gamma,
                "gamma_policy": condition.gamma_policy,
                "tree": condition.tree,
                "seconds": of[condition].seconds[0],
                "num_tokens": of[condition].num_tokens[0],
                "num_forwards": stats.num_rounds + stats.num_prefills,
            }
        )
    return {"key": key, "category": category, "group": group_of(category), "conditions": entries}


if __name__ == "__main__":
    run_command(main)
