"""Which draft to train: `python -m pipeline.search PLAN key=value ...`.

Every candidate's step times are measured first (preflight). Then all are trained for a short budget and ranked by the speedup
that acceptance and step times predict; the better half is trained anew for twice as long, and so on, until one is left.
"""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from eval.prediction import times_of_verdict
from eval.theory import StepTimes
from pipeline.commands import read_plan, run_command
from pipeline.halving import successive_halving
from pipeline.report import read_result
from pipeline.schema import STAGE_NAMES
from pipeline.search_score import Score, require_measured, score_candidate, with_common_target
from pipeline.search_table import Rungs, as_dict, markdown_table, pareto_figure
from pipeline.store import fingerprint_of, write_json
from pipeline.tracking_groups import open_group
from pipeline.trials import Runner, Trial, TrialFailed, plan_trials, run_trial

TRAINING_STAGES = ("corpus", "distill", "eval")
TIMING_STAGES = ("preflight",)


@dataclass
class SearchPlan:
    """`conf/search/*.yaml`. Words of the command line change its fields as `search.field=value`.

    `candidates` are settings by name, on top of `overrides` and of the command line's. `temperature` and `sampler`: as the
    draft will be served.
    """

    first_minutes: float = 1.0
    keep_fraction: float = 0.5
    temperature: float = 0.0
    sampler: str = "probabilistic"
    max_gamma: int = 6
    train_winner: bool = False
    overrides: list[str] = field(default_factory=list)
    candidates: dict[str, list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.first_minutes <= 0 or not 0 < self.keep_fraction < 1 or self.max_gamma < 1:
            raise ValueError(
                f"search.first_minutes={self.first_minutes} must be > 0, search.keep_fraction={self.keep_fraction} within 0 "
                f"and 1, search.max_gamma={self.max_gamma} at least 1"
            )


class Search:
    """One search. `run` takes a trial through some stages (another one in tests)."""

    def __init__(self, name: str, plan: SearchPlan, words: Sequence[str], run: Runner = run_trial) -> None:
        """Check every candidate.

        Raises:
            ValueError: one that cannot work, named.
        """
        self.name, self.plan, self.words, self.run = name, plan, list(words), run
        if not plan.candidates:
            raise ValueError(f"search {name}: the plan has no candidates")
        self.console = Console(highlight=False)
        limits = [f"preflight.max_gamma={plan.max_gamma}", f"eval.max_gamma={plan.max_gamma}"]
        self.base = [*plan.overrides, *limits, *words]
        self.timing = self._trials([])
        for trial in self.timing.values():
            require_measured(trial.config.eval, temperature=plan.temperature, sampler=plan.sampler)
        config = next(iter(self.timing.values())).config
        key = fingerprint_of({name: trial.fingerprints["eval"] for name, trial in self.timing.items()})
        self.key = f"{name}-{key[:8]}"
        self.folder = Path(config.artifacts_dir) / "search" / self.key
        self.config = config

    def _trials(self, budget: Sequence[str]) -> dict[str, Trial]:
        named = {
            f"{self.name}: {candidate}": [*self.base, *settings, *budget]
            for candidate, settings in self.plan.candidates.items()
        }
        return dict(zip(self.plan.candidates, plan_trials(named), strict=True))

    def search(self) -> Rungs:
        """Run what is not finished; the first result of the last round is the winner.

        Raises:
            ValueError: every candidate of a round failed.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with open_group(self.config, name=f"search {self.name}", key=self.key) as group:
            parent = group.parent_id if group else ""
            times = self._times(parent)
            by_budget: dict[float, dict[str, Trial]] = {}

            def evaluate(candidate: str, minutes: float) -> Score | None:
                if minutes not in by_budget:
                    by_budget[minutes] = self._trials([f"train.max_minutes={minutes:g}"])
                return self._score(candidate, by_budget[minutes][candidate], times[candidate], parent)

            rungs = successive_halving(
                list(times), evaluate, first_budget=self.plan.first_minutes, keep_fraction=self.plan.keep_fraction,
                on_rung=self._write,
            )  # fmt: skip
            winner = next(iter(rungs[-1].results))
            if group:
                group.log_figure(pareto_figure(rungs, title=self._title()), "pareto.png")
                group.log_reference("search", self.folder)
                group.log_tags({"winner": winner})
                group.log_metrics({f"{name} predicted_speedup": one.speedup for name, one in _latest(rungs).items()})
            self.console.print(self._advice(winner), soft_wrap=True)
            if self.plan.train_winner:
                self._attempt(winner, self.timing[winner], STAGE_NAMES, parent)
        return rungs

    def _times(self, parent: str) -> dict[str, StepTimes]:
        """Step times of the candidates that can be timed."""
        found = {
            candidate: times_of_verdict(read_result(trial.folders["preflight"], "verdict.json"))
            for candidate, trial in self.timing.items()
            if self._attempt(candidate, trial, TIMING_STAGES, parent)
        }
        if not found:
            raise ValueError(f"search {self.name}: no candidate could be timed; see the messages above")
        return with_common_target(found)

    def _score(self, candidate: str, trial: Trial, times: StepTimes, parent: str) -> Score | None:
        if not self._attempt(candidate, trial, TRAINING_STAGES, parent):
            return None
        return score_candidate(
            trial.folders["eval"],
            trial.folders["distill"],
            times,
            temperature=self.plan.temperature,
            sampler=self.plan.sampler,
            max_gamma=self.plan.max_gamma,
        )

    def _attempt(self, candidate: str, trial: Trial, stages: Sequence[str], parent: str) -> bool:
        self.console.print(f"[bold]{candidate}[/]: {', '.join(stages)}")
        try:
            self.run(trial, stages, parent_run=parent)
        except TrialFailed as failure:
            self.console.print(f"[red]failed:[/] {failure}; the others go on")
            return False
        return True

    def _write(self, rungs: Rungs) -> None:
        write_json(self.folder / "search.json", {"plan": vars(self.plan), "rounds": as_dict(rungs)})
        (self.folder / "search.md").write_text(markdown_table(rungs), encoding="utf-8")
        pareto_figure(rungs, title=self._title()).savefig(self.folder / "pareto.png", dpi=150)
        self.console.print(markdown_table(rungs), soft_wrap=True)

    def _title(self) -> str:
        where = "T = 0" if self.plan.temperature == 0 else f"T = {self.plan.temperature:g}, {self.plan.sampler}"
        return f"Acceptance against draft cost, {where}; labels: predicted speedup after each one's last round"

    def _advice(self, winner: str) -> str:
        settings = shlex.join([*self.words, *self.plan.candidates[winner]])
        return (
            f"winner: {winner} ({' '.join(self.plan.candidates[winner])})\ntable and plot: {self.folder}\n"
            f"train it in full: .venv/bin/python -m pipeline {settings}"
        )


def _latest(rungs: Rungs) -> Mapping[str, Score]:
    """Each candidate's score in the last round that it was in."""
    found: dict[str, Score] = {}
    for rung in rungs:
        found |= rung.results
    return found


def main(words: list[str]) -> None:
    """The command."""
    name, plan, rest = read_plan(SearchPlan, "search", words)
    Search(name, plan, rest).search()


if __name__ == "__main__":
    run_command(main)
