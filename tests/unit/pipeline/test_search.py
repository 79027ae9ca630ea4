"""The draft search: the planted best draft wins, failures drop out, and scores follow from what was measured."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from eval.theory import StepTimes, predicted_speedup
from pipeline.commands import compose_config, read_plan
from pipeline.config import conf_dir
from pipeline.halving import Rung, successive_halving
from pipeline.search import Search, SearchPlan
from pipeline.search_score import Score, pareto_front, with_common_target
from pipeline.search_table import markdown_table, pareto_figure
from pipeline.trials import Trial, TrialFailed
from tests.unit.pipeline.report_samples import acceptance_row
from tests.unit.pipeline.trial_results import finish_stage, write_trial

TARGET_MS = (40.0, 42.0, 44.0)
#: By `draft.num_layers`.
ALPHA = {1: 0.2, 2: 0.6, 3: 0.62}
DRAFT_MS = {1: 3.0, 2: 5.0, 3: 20.0}


@dataclass(frozen=True)
class Fake:
    score: float


class TestHalving:
    def test_the_planted_winner_is_found_with_doubling_budgets(self) -> None:
        """`late` is third after the first round and the best from the second on."""
        calls: list[tuple[str, float]] = []

        def evaluate(name: str, budget: float) -> Fake:
            calls.append((name, budget))
            values = {"a": 1.2, "b": 1.1, "late": 1.0 if budget < 2 else 1.5, "d": 0.9, "e": 0.8, "f": 0.7}
            return Fake(values[name])

        seen: list[int] = []
        names = ["a", "b", "late", "d", "e", "f"]
        rungs = successive_halving(
            names, evaluate, first_budget=1.0, on_rung=lambda rungs: seen.append(len(rungs))
        )
        assert [(rung.budget, list(rung.results)) for rung in rungs] == [
            (1.0, ["a", "b", "late", "d", "e", "f"]),
            (2.0, ["late", "a", "b"]),
            (4.0, ["late", "a"]),
        ]
        assert len(calls) == 6 + 3 + 2
        assert seen == [1, 2, 3]

    def test_a_failed_candidate_drops_out(self) -> None:
        rungs = successive_halving(
            ["a", "b"], lambda name, budget: None if name == "a" else Fake(0.1), first_budget=1
        )
        assert [list(rung.results) for rung in rungs] == [["b"]]

    def test_nothing_left_is_an_error(self) -> None:
        with pytest.raises(ValueError, match="all 2 candidates failed at a budget of 3"):
            successive_halving(["a", "b"], lambda name, budget: None, first_budget=3)

    @pytest.mark.parametrize(("names", "keep", "budget"), [([], 0.5, 1), (["a"], 1.0, 1), (["a"], 0.5, 0)])
    def test_arguments_that_cannot_work(self, names: list[str], keep: float, budget: float) -> None:
        with pytest.raises(ValueError, match="candidates"):
            successive_halving(names, lambda n, b: Fake(1), first_budget=budget, keep_fraction=keep)


def score(alpha: float, draft_ms: float, speedup: float = 1.0) -> Score:
    return Score(alpha, 1, 1 + alpha, speedup, {1: speedup}, draft_ms, draft_ms / 40, 100)


def test_pareto_front_holds_what_nothing_cheaper_reaches() -> None:
    scores = {"dear": score(0.5, 9), "cheap": score(0.3, 2), "bad": score(0.2, 5), "even": score(0.3, 3), "best": score(0.6, 8)}
    assert pareto_front(scores) == ["cheap", "best"]


def test_target_times_are_shared_and_draft_times_are_not() -> None:
    times = {
        "a": StepTimes(4.0, (40.0, 41.0, 42.0), 1.0, 5.0),
        "b": StepTimes(6.0, (44.0, 47.0), 3.0, 7.0),
        "c": StepTimes(9.0, (90.0, 95.0), 2.0, None),
    }
    assert with_common_target(times) == {
        "a": StepTimes(4.0, (44.0, 47.0), 2.0, 5.0),
        "b": StepTimes(6.0, (44.0, 47.0), 2.0, 7.0),
        "c": StepTimes(9.0, (44.0, 47.0), 2.0, None),
    }


class FakeRuns:
    """Deeper drafts are accepted more and cost more; `draft.num_layers=2` is planted as the best trade."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, tuple[str, ...], float | None]] = []
        self.broken: set[int] = set()

    def __call__(self, trial: Trial, stages: Sequence[str], *, parent_run: str = "") -> None:
        if trial.is_finished(stages):
            return
        depth, minutes = trial.config.draft.num_layers, trial.config.train.max_minutes
        self.calls.append((depth, tuple(stages), minutes))
        if depth in self.broken:
            raise TrialFailed("exit code 1, see its message above")
        if stages == ("preflight",):
            finish_stage(trial, "preflight", {"verdict.json": self.verdict(depth)})
        else:
            alpha = ALPHA[depth]
            rounds = {"draft": "distilled", "temperature": 0.0, "sampler": "probabilistic"}
            cumulative = {str(gamma): [alpha**i for i in range(1, gamma + 1)] for gamma in (1, 2)}
            acceptance = {
                "acceptance_rate": [acceptance_row("undistilled", value=0.05), acceptance_row(value=alpha)],
                "rounds": [{**rounds, "cumulative_acceptance": cumulative}],
            }
            write_trial(trial, sums={(0.0, "probabilistic"): [1.0]}, counts=[2], acceptance=acceptance)

    def verdict(self, depth: int) -> dict[str, object]:
        return {
            "T_target_ms": {str(width): ms for width, ms in enumerate(TARGET_MS, start=1)},
            "T_draft_ms": DRAFT_MS[depth],
            "T_draft_first_ms": DRAFT_MS[depth] + 1,
            "overhead_ms": 1.0,
        }


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    return ["+experiment=tiny", "train.max_steps=null", "train.num_epochs=100", "tracking=off", f"artifacts_dir={tmp_path}"]


def plan_of(**changes: object) -> SearchPlan:
    candidates = {f"depth_{depth}": [f"draft.num_layers={depth}"] for depth in (1, 2, 3)}
    return SearchPlan(**{"max_gamma": 2, "first_minutes": 1.5, "candidates": candidates, **changes})  # type: ignore[arg-type]


def test_the_best_trade_wins_and_its_score_is_the_theory_s(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = FakeRuns()
    rungs = Search("trial", plan_of(), words, runs).search()
    assert [(rung.budget, list(rung.results)) for rung in rungs] == [
        (1.5, ["depth_2", "depth_1", "depth_3"]),
        (3.0, ["depth_2", "depth_1"]),
    ]
    assert [call for call in runs.calls if call[1] == ("preflight",)] == [(depth, ("preflight",), None) for depth in (1, 2, 3)]
    assert [(depth, minutes) for depth, stages, minutes in runs.calls if "distill" in stages] == [
        (1, 1.5), (2, 1.5), (3, 1.5), (2, 3.0), (1, 3.0),
    ]  # fmt: skip
    best = rungs[-1].results["depth_2"]
    expected = predicted_speedup(
        tau=1 + 0.6 + 0.36, gamma=2, draft_ms=(6 + 5) / 2, target_ms=40.0, verify_ms=44.0, overhead_ms=1.0
    )
    assert (best.gamma, best.speedup, best.acceptance_rate) == (2, pytest.approx(expected), 0.6)
    [folder] = (tmp_path / "search").iterdir()
    saved = json.loads((folder / "search.json").read_text())
    assert [one["name"] for one in saved["rounds"][0]["candidates"]] == ["depth_2", "depth_1", "depth_3"]
    assert (folder / "pareto.png").stat().st_size > 1000
    out = capsys.readouterr().out
    assert "winner: depth_2" in out
    assert "draft.num_layers=2" in out
    Search("trial", plan_of(), words, runs).search()
    assert len(runs.calls) == 8, "everything is reused"


def test_candidates_that_fail_drop_out_and_the_winner_can_be_trained_in_full(words: list[str]) -> None:
    runs = FakeRuns()
    runs.broken = {1}
    rungs = Search("trial", plan_of(train_winner=True), words, runs).search()
    assert list(rungs[-1].results) == ["depth_2", "depth_3"]
    depth, stages, minutes = runs.calls[-1]
    assert (depth, stages[-1], minutes) == (2, "export", None)
    runs.broken = {1, 2, 3}
    with pytest.raises(ValueError, match="no candidate could be timed"):
        Search("trial", plan_of(), [*words, "train.seed=9", "preflight.context_tokens=33"], runs).search()


@pytest.mark.parametrize("change", [{"temperature": 0.7}, {"sampler": "argmax"}])
def test_what_will_not_be_measured_is_refused_before_anything_runs(words: list[str], change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"search: acceptance at temperature .* is not measured; set eval.temperatures"):
        Search("trial", plan_of(**change), words, FakeRuns())


def test_a_candidate_that_cannot_work_is_found_first(words: list[str]) -> None:
    runs = FakeRuns()
    with pytest.raises(ValueError, match=r"bad: draft.num_layers=99"):
        Search("trial", plan_of(candidates={"good": [], "bad": ["draft.num_layers=99"]}), words, runs)
    with pytest.raises(ValueError, match="no candidates"):
        Search("trial", plan_of(candidates={}), words, runs)
    with pytest.raises(ValueError, match="first_minutes"):
        plan_of(first_minutes=0)
    assert runs.calls == []


def test_table_and_plot_show_every_round() -> None:
    rungs = [
        Rung(1.0, {"a": score(0.5, 5, 1.2), "b": score(0.4, 3, 1.1), "c": score(0.3, 4, 1.0)}),
        Rung(2.0, {"a": score(0.55, 5, 1.3)}),
    ]
    lines = markdown_table(rungs).splitlines()
    assert lines[2].startswith("| 2 | a * | 1.300 |")
    assert [line.split(" | ")[1] for line in lines[3:6]] == ["a *", "b *", "c"]
    axes = pareto_figure(rungs, title="t").axes[0]
    assert len(axes.collections) == 2
    assert {text.get_text(): text.xy for text in axes.texts} == {"a\n1.30x": (5, 0.55), "b\n1.10x": (3, 0.4), "c\n1.00x": (4, 0.3)}


@pytest.mark.parametrize("name", sorted(file.stem for file in (conf_dir() / "search").glob("*.yaml")))
def test_every_shipped_plan_composes_with_distinct_candidates(name: str) -> None:
    _, plan, _ = read_plan(SearchPlan, "search", [name])
    drafts = [
        str(compose_config(["+experiment=smollm2_cpu", *plan.overrides, *settings]).draft) for settings in plan.candidates.values()
    ]
    assert len(set(drafts)) == len(drafts) > 3
