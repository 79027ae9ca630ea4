"""Variants of a recipe at equal budgets, several training seeds each: `python -m pipeline.ablation PLAN key=value ...`.

Every (variant, seed) goes through corpus, distill and eval; the corpus is common to all that do not change it. The table
is written after each of them, so an interrupted command leaves what is known so far.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from pipeline.ablation_table import AblationResult, Outcome, ablation_figure, markdown_table, summarise
from pipeline.commands import read_plan, run_command
from pipeline.store import fingerprint_of, write_json
from pipeline.tracking_groups import GroupTracker, open_group
from pipeline.trials import Runner, TrialFailed, plan_trials, run_trial

STAGES = ("corpus", "distill", "eval")


@dataclass
class AblationPlan:
    """`conf/ablation/*.yaml`. Words of the command line change its fields as `ablation.field=value`.

    `variants` are settings by name, on top of `overrides` and of the command line's. `only` takes some of them.
    """

    baseline: str = ""
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2])
    overrides: list[str] = field(default_factory=list)
    variants: dict[str, list[str]] = field(default_factory=dict)
    only: list[str] = field(default_factory=list)
    num_bootstrap: int = 2000

    def chosen(self) -> dict[str, list[str]]:
        """The variants to run, the baseline always among them.

        Raises:
            ValueError: unknown names, no seeds.
        """
        unknown = sorted({self.baseline, *self.only} - set(self.variants))
        if unknown:
            raise ValueError(f"ablation: {unknown} are not among the variants {list(self.variants)}")
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"ablation.seeds={self.seeds}: give one or more, each once")
        names = {self.baseline, *self.only} if self.only else set(self.variants)
        return {name: words for name, words in self.variants.items() if name in names}


def run_ablation(name: str, plan: AblationPlan, words: Sequence[str], *, run: Runner = run_trial) -> AblationResult:
    """Run what is not finished and return the table, also written to `<artifacts_dir>/ablation/<name>-<key>/`.

    Args:
        words: settings of every run, after the plan's own. run: how a trial is run (for tests).

    Raises:
        ValueError: a variant that cannot work, found before anything runs; or no run of the baseline was finished.
    """
    variants = plan.chosen()
    overrides_of = {
        (variant, seed): [*plan.overrides, *words, *settings, f"train.seed={seed}"]
        for seed in plan.seeds  # seed by seed, so that a table of all variants is there early
        for variant, settings in variants.items()
    }
    trials = plan_trials({f"{name}: {variant}, seed {seed}": o for (variant, seed), o in overrides_of.items()})
    outcomes = [Outcome(*key, trial) for key, trial in zip(overrides_of, trials, strict=True)]
    config = trials[0].config
    key = f"{name}-{fingerprint_of({'runs': [trial.fingerprints['eval'] for trial in trials]})[:8]}"
    folder = Path(config.artifacts_dir) / "ablation" / key
    folder.mkdir(parents=True, exist_ok=True)
    console = Console(highlight=False)
    with open_group(config, name=f"ablation {name}", key=key) as group:
        for number, outcome in enumerate(outcomes, start=1):
            console.print(f"[bold]{number}/{len(outcomes)} {outcome.trial.name}[/]")
            _run_one(outcome, run, parent_run=group.parent_id if group else "")
            if outcome.failure is not None:
                console.print(f"[red]failed:[/] {outcome.failure}; the others go on")
            result = _write(folder, outcomes, plan, variants)
        _record(group, folder, result)
    console.print(markdown_table(result), soft_wrap=True)
    console.print(f"table: {folder / 'ablation.md'}", soft_wrap=True)
    if not result.rows:
        raise ValueError(f"ablation {name}: no run of the baseline {plan.baseline!r} was finished; see the messages above")
    return result


def _run_one(outcome: Outcome, run: Runner, *, parent_run: str) -> None:
    try:
        run(outcome.trial, STAGES, parent_run=parent_run)
    except TrialFailed as failure:
        outcome.failure = str(failure)
    else:
        outcome.finished = True


def _write(folder: Path, outcomes: list[Outcome], plan: AblationPlan, variants: dict[str, list[str]]) -> AblationResult:
    result = summarise(outcomes, variants=variants, baseline=plan.baseline, num_bootstrap=plan.num_bootstrap)
    write_json(folder / "ablation.json", result.as_dict())
    (folder / "ablation.md").write_text(markdown_table(result), encoding="utf-8")
    return result


def _record(group: GroupTracker | None, folder: Path, result: AblationResult) -> None:
    if group is None or not result.rows:
        return
    group.log_figure(ablation_figure(result), "ablation.png")
    group.log_reference("ablation", folder)
    group.log_metrics(result.metrics())


def main(words: list[str]) -> None:
    """The command."""
    name, plan, rest = read_plan(AblationPlan, "ablation", words)
    run_ablation(name, plan, rest)


if __name__ == "__main__":
    run_command(main)
