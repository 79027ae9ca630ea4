"""An ablation, a search and a comparison on seeded random models, through their commands."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.conftest import run_module

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ABLATION = """
baseline: kl
seeds: [0, 1]
overrides: [train.max_steps=12, eval.num_decoded_prompts=0, eval.num_viewer_prompts=0]
variants:
  kl: [loss=forward_kl]
  tv: [loss=tv]
"""
SEARCH = """
first_minutes: 0.02
max_gamma: 2
overrides: [train.max_steps=null, train.num_epochs=50, eval.num_decoded_prompts=0, eval.num_viewer_prompts=0]
candidates:
  shallow: [draft.num_layers=1]
  deep: [draft.num_layers=3]
"""


def run(module: str, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return run_module(module, *words, folder=folder, timeout_s=800)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experiments")
    (folder / "losses.yaml").write_text(ABLATION)
    (folder / "drafts.yaml").write_text(SEARCH)
    return folder


@pytest.fixture(scope="module")
def ablated(folder: Path) -> Path:
    done = run("pipeline.ablation", folder, "losses.yaml", "+experiment=tiny")
    assert done.returncode == 0, done.stderr
    return folder


def test_two_variants_and_two_seeds_share_a_corpus_and_make_a_table(ablated: Path) -> None:
    assert len(list((ablated / "artifacts" / "corpus").iterdir())) == 1
    assert len(list((ablated / "artifacts" / "eval").iterdir())) == 4
    [table] = (ablated / "artifacts" / "ablation").glob("*/ablation.json")
    result = json.loads(table.read_text())
    assert [(row["variant"], row["seeds"]) for row in result["rows"]] == [("kl", [0, 1]), ("tv", [0, 1])]
    for cell in result["rows"][1]["cells"]:
        assert 0 <= cell["value"]["low"] <= cell["value"]["high"] <= 1
        assert cell["difference"]["low"] <= cell["difference"]["value"] <= cell["difference"]["high"]


def test_all_runs_lie_under_one_in_mlflow(ablated: Path) -> None:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{ablated}/mlflow.db")
    [experiment] = client.search_experiments(filter_string="name = 'draftsmith'")
    runs = client.search_runs([experiment.experiment_id])
    [group] = [run for run in runs if run.info.run_name == "ablation losses"]
    below = [run for run in runs if run.data.tags.get("mlflow.parentRunId") == group.info.run_id]
    assert {run.info.run_name for run in below} == {f"losses: {v}, seed {s}" for v in ("kl", "tv") for s in (0, 1)}
    assert all("acceptance_rate_t0" in run.data.metrics for run in below)
    assert group.info.status == "FINISHED"
    assert "kl T 0" in group.data.metrics


def test_the_same_command_again_runs_nothing(ablated: Path) -> None:
    again = run("pipeline.ablation", ablated, "losses.yaml", "+experiment=tiny")
    assert again.returncode == 0, again.stderr
    assert " starts " not in again.stdout
    assert "| kl | 2 |" in again.stdout


def test_the_runs_are_compared(ablated: Path) -> None:
    done = run("pipeline.compare", ablated, "+experiment=tiny")
    assert done.returncode == 0, done.stderr
    page = (ablated / "artifacts" / "compare.html").read_text()
    for name in ("losses: tv, seed 1", "losses: kl, seed 0"):
        assert name in done.stdout
        assert name in page


def test_a_search_trains_the_better_half_longer(ablated: Path) -> None:
    done = run("pipeline.search", ablated, "drafts.yaml", "+experiment=tiny")
    assert done.returncode == 0, done.stderr
    [file] = (ablated / "artifacts" / "search").glob("*/search.json")
    [first] = json.loads(file.read_text())["rounds"]
    names = [one["name"] for one in first["candidates"]]
    assert set(names) == {"shallow", "deep"}
    speedups = [one["speedup"] for one in first["candidates"]]
    assert speedups == sorted(speedups, reverse=True)
    assert f"winner: {names[0]}" in done.stdout


def test_mistakes_end_with_2_and_a_message(folder: Path) -> None:
    done = run("pipeline.ablation", folder, "losses.yaml", "+experiment=tiny", "train.max_setps=3")
    assert done.returncode == 2
    assert "max_setps" in done.stderr
    assert "Traceback" not in done.stderr
