"""Is greedy output unchanged? `python -m pipeline.check_lossless +experiment=smollm2_cpu [setting=value ...]`.

Takes the distilled draft of a finished run, and from the settings of `bench` the prompts, what is proposed (`gammas`, `trees`,
`ngram_gammas`, and Medusa heads of a folder, `medusa_heads`), `batch_sizes`, `dtype`, `max_new_tokens` and whether `hf_generate` is
compared with. Exit code 1 when an output is not what it must be.
"""

import sys
from collections.abc import Iterable
from pathlib import Path

from rich.table import Table

from eval.bench_conditions import BackendFactory
from eval.lossless_check import Comparison, LosslessCheck
from pipeline.commands import compose_config, run_command
from pipeline.console import result_console
from pipeline.drafts import MEDUSA, load_bench_drafts
from pipeline.finished import finished_context
from pipeline.models import load_causal_lm, resolve_target
from pipeline.report import describe_machine
from pipeline.schema import Config
from pipeline.stage_bench import choose_prompts
from pipeline.store import write_json
from pipeline.tracking import open_tracker

EXIT_NOT_LOSSLESS = 1


def main(words: list[str]) -> None:
    """The command."""
    if not check_lossless(compose_config(words)):
        sys.exit(EXIT_NOT_LOSSLESS)


def check_lossless(config: Config) -> bool:
    """Runs, prints and writes `<artifacts_dir>/lossless/<dtype>.json`; whether nothing speaks against losslessness.

    Raises:
        ValueError: the draft is not trained yet, or no prompt can be used.
    """
    reference, dtype = resolve_target(config), config.bench.dtype or config.target.dtype
    console = result_console()
    with open_tracker(config) as tracker:
        context = finished_context(config, reference, ["corpus", "distill"], work_dir=Path(), tracker=tracker)
    target = load_causal_lm(reference.path, dtype, config.target.trust_remote_code)
    chosen = choose_prompts(context, target)
    factory = BackendFactory(target, load_bench_drafts(context, dtype=dtype), config.runtime)
    check = LosslessCheck(
        factory,
        chosen.prompts,
        config.bench,
        drafts=[name for name in ("distilled", MEDUSA) if name in factory.drafts],
        on_run=lambda name: console.print(f"runs     {name}"),
    )
    comparisons, path = [], Path(config.artifacts_dir) / "lossless" / f"{dtype}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    settings = {
        "machine": describe_machine(dtype), "max_new_tokens": config.bench.max_new_tokens, **chosen.describe()
    }  # fmt: skip
    for comparison in check.comparisons():
        comparisons.append(comparison)
        write_json(path, {"comparisons": [c.as_dict() for c in comparisons], "settings": settings})
        console.print(_line(comparison))
    console.print(_table(comparisons))
    console.print(
        f"{len(chosen.prompts)} prompts, {config.bench.max_new_tokens} new tokens, {dtype}: {path}",
        soft_wrap=True,
    )
    return all(comparison.is_lossless for comparison in comparisons if comparison.kind == "speculative")


def _line(comparison: Comparison) -> str:
    return f"         {comparison.num_identical}/{comparison.num_outputs} are those of {comparison.against}"


def _table(comparisons: Iterable[Comparison]) -> Table:
    table = Table("run", "compared with", "identical", "largest top-2 gap of a difference", "verdict")
    for c in comparisons:
        gap = max((mismatch.top2_gap for mismatch in c.mismatches), default=None)
        verdict = "identical" if not c.mismatches else "near ties only" if c.is_lossless else "DIFFERS"
        table.add_row(
            c.what,
            c.against,
            f"{c.num_identical}/{c.num_outputs}",
            "-" if gap is None else f"{gap:.3f}",
            verdict,
        )
    return table


if __name__ == "__main__":
    run_command(main)
