"""The ablation: what it runs, what it reuses, what it survives, and what it makes of the runs' figures."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from eval.crossed_bootstrap import crossed_difference
from pipeline.ablation import AblationPlan, run_ablation
from pipeline.ablation_table import ablation_figure, markdown_table
from pipeline.commands import compose_config, read_plan
from pipeline.config import conf_dir
from pipeline.trials import Trial, TrialFailed, plan_trials
from tests.unit.pipeline.trial_results import write_trial

COUNTS = [10, 20, 30, 5]
PLANS = sorted(file.stem for file in (conf_dir() / "ablation").glob("*.yaml"))


def plan_of(**changes: object) -> AblationPlan:
    variants = {"kl": ["loss=forward_kl"], "tv": ["loss=tv"], "jsd": ["loss=jsd"]}
    plan = AblationPlan(baseline="kl", seeds=[0, 1], variants=variants, num_bootstrap=200)
    for name, value in changes.items():
        setattr(plan, name, value)
    return plan


class FakeRuns:
    """Runs a trial by writing its results: acceptance of .5, .6 and .4 for the three losses, a little more per seed."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.broken: set[tuple[str, int]] = set()
        self.counts = {"forward_kl": COUNTS, "tv": COUNTS, "jsd": COUNTS}

    def __call__(self, trial: Trial, stages: Sequence[str], *, parent_run: str = "") -> None:
        if trial.is_finished(stages):
            return
        [loss], seed = trial.config.loss.weights, trial.config.train.seed
        self.calls.append((loss, seed))
        if (loss, seed) in self.broken:
            raise TrialFailed("exit code 1, see its message above")
        value = {"forward_kl": 0.5, "tv": 0.6, "jsd": 0.4}[loss] + 0.01 * seed
        counts = self.counts[loss]
        spread = np.linspace(-0.1, 0.1, len(counts))
        sums = [float((value + extra) * count) for extra, count in zip(spread, counts, strict=True)]
        figures = {(0.0, "probabilistic"): sums, (0.0, "greedy"): sums, (1.0, "probabilistic"): [s * 0.8 for s in sums]}
        write_trial(trial, sums=figures, counts=counts)


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    return ["+experiment=tiny", "tracking=off", f"artifacts_dir={tmp_path}"]


def test_every_variant_and_seed_runs_once_and_is_reused(words: list[str], tmp_path: Path) -> None:
    runs = FakeRuns()
    result = run_ablation("losses", plan_of(), words, run=runs)
    assert runs.calls == [(loss, seed) for seed in (0, 1) for loss in ("forward_kl", "tv", "jsd")]
    again = run_ablation("losses", plan_of(), words, run=runs)
    assert len(runs.calls) == 6
    assert again == result
    more = run_ablation("losses", plan_of(seeds=[0, 1, 2]), words, run=runs)
    assert runs.calls[6:] == [(loss, 2) for loss in ("forward_kl", "tv", "jsd")]
    assert more.rows[0].seeds == [0, 1, 2]
    assert len(list((tmp_path / "corpus").iterdir())) == 1, "train.seed must not make another corpus"


def test_the_table_holds_paired_differences_from_the_baseline(words: list[str], tmp_path: Path) -> None:
    result = run_ablation("losses", plan_of(), words, run=FakeRuns())
    rows = {row.variant: row for row in result.rows}
    assert [cell.name for cell in rows["tv"].cells] == ["T=0", "T=1 probabilistic"]
    counts, spread = np.array(COUNTS, dtype=float), np.linspace(-0.1, 0.1, 4)
    expected = {
        loss: np.array([[(base + 0.01 * seed + extra) * n for extra, n in zip(spread, counts, strict=True)] for seed in (0, 1)])
        for loss, base in (("kl", 0.5), ("tv", 0.6))
    }
    tv = rows["tv"].cells[0]
    assert tv.value.value == pytest.approx(expected["tv"].mean(axis=0).sum() / counts.sum())
    assert tv.difference == crossed_difference(expected["tv"], expected["kl"], counts, num_bootstrap=200)
    assert tv.difference is not None
    assert tv.difference.value == pytest.approx(0.1)
    assert rows["kl"].cells[0].difference is None
    text = markdown_table(result)
    assert text.splitlines()[2].startswith("| tv |"), "best first"
    assert "**+0.100 [+0.100, +0.100]**" in text
    assert "4 at T=0" in text
    [folder] = (tmp_path / "ablation").iterdir()
    assert (folder / "ablation.md").read_text() == text
    assert json.loads((folder / "ablation.json").read_text())["rows"][1]["variant"] == "tv"
    assert len(ablation_figure(result).axes) == 2


def test_a_failed_run_is_reported_and_the_others_go_on(words: list[str]) -> None:
    runs = FakeRuns()
    runs.broken = {("tv", 0), ("jsd", 0), ("jsd", 1)}
    result = run_ablation("losses", plan_of(), words, run=runs)
    assert len(runs.calls) == 6
    assert {row.variant: row.seeds for row in result.rows} == {"kl": [0, 1], "tv": [1]}
    assert [failure[:2] for failure in result.failures] == [("tv", 0), ("jsd", 0), ("jsd", 1)]
    assert "Failed: jsd, seed 1: exit code 1" in markdown_table(result)
    difference = result.rows[1].cells[0].difference
    assert difference is not None
    assert difference.value == pytest.approx(0.1), "seed 1 of both, not seed 1 against the mean of both"
    runs.broken = set()
    assert len(run_ablation("losses", plan_of(), words, run=runs).failures) == 0


def test_without_a_baseline_run_there_is_no_table(words: list[str]) -> None:
    runs = FakeRuns()
    runs.broken = {("forward_kl", 0), ("forward_kl", 1)}
    with pytest.raises(ValueError, match="no run of the baseline 'kl'"):
        run_ablation("losses", plan_of(), words, run=runs)


def test_runs_on_other_prompts_are_not_compared(words: list[str]) -> None:
    runs = FakeRuns()
    runs.counts["tv"] = [*COUNTS, 7]
    with pytest.raises(ValueError, match="different held-out answers"):
        run_ablation("losses", plan_of(), words, run=runs)


def test_a_mistake_in_the_last_variant_is_found_before_the_first_runs(words: list[str]) -> None:
    runs = FakeRuns()
    plan = plan_of(variants={"kl": ["loss=forward_kl"], "bad": ["draft.num_layers=99"]})
    with pytest.raises(ValueError, match=r"bad, seed 0: draft.num_layers=99"):
        run_ablation("losses", plan, words, run=runs)
    assert runs.calls == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"baseline": "nothing"}, "nothing"),
        ({"only": ["tv", "nothing"]}, "nothing"),
        ({"seeds": []}, "seeds"),
        ({"seeds": [1, 1]}, "each once"),
    ],
)
def test_plans_that_cannot_work_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_of(**changes).chosen()


def test_only_some_variants() -> None:
    assert list(plan_of(only=["jsd"]).chosen()) == ["kl", "jsd"]


def test_words_change_the_plan_and_the_runs() -> None:
    words = ["losses", "+experiment=tiny", "ablation.seeds=[5]", "train.max_steps=7"]
    name, plan, rest = read_plan(AblationPlan, "ablation", words)
    assert (name, plan.seeds, rest) == ("losses", [5], ["+experiment=tiny", "train.max_steps=7"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "name a plan first: .*losses"),
        (["+experiment=tiny"], "name a plan first"),
        (["nothing"], "no such plan"),
        (["losses", "ablation.sedes=[1]"], "sedes"),
    ],
)
def test_wrong_plan_words_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_plan(AblationPlan, "ablation", words)


def test_options_of_hydra_are_refused() -> None:
    with pytest.raises(ValueError, match="--multirun"):
        compose_config(["+experiment=tiny", "--multirun"])


@pytest.mark.parametrize("name", PLANS)
def test_every_shipped_plan_composes_with_distinct_variants(name: str) -> None:
    """Two variants with equal settings would share one fingerprint, and the second would be a copy of the first."""
    _, plan, _ = read_plan(AblationPlan, "ablation", [name])
    variants = plan.chosen()
    configs = [compose_config(["+experiment=smollm2_cpu", *plan.overrides, *words]) for words in variants.values()]
    assert len(configs) >= 2
    assert len({str(config) for config in configs}) == len(configs)
    assert all(config.train.max_minutes or config.train.max_steps for config in configs)


def test_the_losses_plan_has_every_loss() -> None:
    from distill.config import LOSS_NAMES

    _, plan, _ = read_plan(AblationPlan, "ablation", ["losses"])
    assert set(plan.variants) == set(LOSS_NAMES)


def test_planned_folders_are_those_of_the_pipeline(words: list[str]) -> None:
    [one, other] = plan_trials({"a": [*words, "train.seed=0"], "b": [*words, "train.seed=1"]})
    assert one.folders["corpus"] == other.folders["corpus"]
    assert one.folders["eval"] != other.folders["eval"]
    assert one.folders["eval"].name == one.fingerprints["eval"][:12]
