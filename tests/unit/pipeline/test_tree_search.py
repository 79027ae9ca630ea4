"""The search for a tree: measured, predicted, timed, and one setting at the end."""

import json
from pathlib import Path

import pytest
import torch

from eval.bench_conditions import Condition
from eval.config import BenchConfig, EvalConfig
from pipeline import tree_search as module
from pipeline.schema import Config, PreflightConfig, TrackingConfig
from pipeline.tree_search import TreeSearchPlan, main, search_trees, setting_of
from specdec_runtime import DecoderConfig
from tests.unit.pipeline.corpus_samples import tiny_config
from tests.unit.pipeline.trained_samples import finish_stages

torch.set_num_threads(1)
PLAN = TreeSearchPlan(max_nodes=6, max_depth=3, num_guesses=3, num_trees=2, max_seconds=5.0)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    config = tiny_config(tmp_path_factory.mktemp("search") / "artifacts", num_prompts=24, held_out_fraction=0.5)
    config.bench = BenchConfig(num_prompts=3, max_new_tokens=8, temperatures=[0.0], num_bootstrap=20)
    config.preflight = PreflightConfig(context_tokens=16, num_repeats=2)
    config.eval = EvalConfig()
    config.tracking = TrackingConfig(enabled=False)
    finish_stages(config)
    return config


def test_a_search_ends_with_a_setting_that_can_be_used(config: Config, capsys: pytest.CaptureFixture[str]) -> None:
    folder = search_trees(config, PLAN)
    result = json.loads((folder / "tree_search.json").read_text())
    last = capsys.readouterr().out.strip().splitlines()[-1]
    assert last == f"use: {result['setting']}"
    ways = [row["way"] for row in result["measured"]]
    assert "plain" in ways and sum(way.startswith("chain") for way in ways) in (2, 3)
    dynamic = [way for way in ways if way.startswith("tree dynamic")]
    assert dynamic and sum(way.startswith("tree") for way in ways) == 2 + len(dynamic)
    speeds = [row["tokens_per_second"] for row in result["measured"]]
    assert speeds == sorted(speeds, reverse=True)
    assert len(result["acceptance_by_rank"]) == 3 and len(result["acceptance_by_rank"][0]) == 3
    assert all(len(p["tree"]) <= 6 for p in result["predictions"])
    page = (folder / "tree_search.md").read_text()
    assert result["reason"] in page and "| guess 3 |" in page and f"Use: `{result['setting']}`" in page


def test_the_chain_is_the_answer_where_the_clock_says_so(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """However good a tree looks on paper: here every tree is given a second more."""
    right = module.measure

    def slowed(*args, **kwargs):
        measured = right(*args, **kwargs)
        for one in measured:
            late_s = 1.0 if one.condition.tree is not None else 0.0 if one.condition.gamma else 0.5
            one.seconds = [seconds + late_s for seconds in one.seconds]
        return measured

    monkeypatch.setattr(module, "measure", slowed)
    folder = search_trees(config, TreeSearchPlan(**{**vars(PLAN), "num_trees": 1}))
    result = json.loads((folder / "tree_search.json").read_text())
    assert result["setting"].startswith("runtime.tree=null runtime.num_speculative_tokens=")
    assert "slower than chain" in result["reason"] and "verification of" in result["reason"]


def test_settings_can_be_read_back() -> None:
    plain = Condition("native", "none", 0, 0.0, 1)
    chain = Condition("native", "distilled", 2, 0.0, 1)
    tree = Condition("native", "distilled", 2, 0.0, 1, tree=(-1, -1, 0))
    dynamic = Condition("native", "distilled", 3, 0.0, 1, tree="dynamic9d3")
    assert setting_of(plain, is_medusa=False) == "runtime.num_speculative_tokens=0"
    assert setting_of(chain, is_medusa=False) == "runtime.tree=null runtime.num_speculative_tokens=2"
    assert setting_of(tree, is_medusa=True) == (
        "runtime.drafter=medusa 'runtime.tree=[-1,-1,0]' runtime.num_speculative_tokens=2"
    )
    assert setting_of(dynamic, is_medusa=False) == "runtime.tree=dynamic9d3 runtime.num_speculative_tokens=3"
    assert DecoderConfig(tree="dynamic9d3", num_speculative_tokens=3).max_proposals == 9


def test_mistakes_are_named(tmp_path: Path) -> None:
    here = [f"artifacts_dir={tmp_path}", "+experiment=tiny", "tracking=off"]
    with pytest.raises(ValueError, match="max_nods"):
        main([*here, "tree_search.max_nods=3"])
    with pytest.raises(ValueError, match="max_nodes=99"):
        main([*here, "tree_search.max_nodes=99"])
    with pytest.raises(ValueError, match="not finished"):
        main(here)
