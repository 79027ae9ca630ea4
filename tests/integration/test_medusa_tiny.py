"""Medusa heads on a seeded random model through the entry point: corpus, heads, acceptance by head, benchmark."""

import json
import subprocess
from pathlib import Path

import pytest

from specdec_runtime import load_medusa_heads
from tests.conftest import run_module

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def run(
    folder: Path, *words: str, experiment: str = "tiny_medusa", module: str = "pipeline"
) -> subprocess.CompletedProcess[str]:
    return run_module(module, f"+experiment={experiment}", *words, folder=folder, timeout_s=500)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("medusa")
    done = run(folder)
    assert done.returncode == 0, done.stderr
    return folder


def latest(folder: Path, stage: str) -> Path:
    return folder / "artifacts" / "latest" / stage


def test_heads_with_card_and_record(folder: Path) -> None:
    draft = latest(folder, "distill") / "draft"
    names = {"README.md", "draftsmith.json", "medusa_config.json", "medusa_heads.safetensors"}
    assert {path.name for path in draft.iterdir()} == names
    assert (load_medusa_heads(draft).shape.num_heads, load_medusa_heads(draft).shape.num_ids) == (2, 200)
    assert 'drafter="medusa", num_speculative_tokens=2' in (draft / "README.md").read_text()
    train = json.loads((latest(folder, "distill") / "train.json").read_text())
    assert 0 < train["num_steps"] <= 40
    assert train["best_dir"] == "draft"
    assert len(train["vocab_shortlist"]) == 200


def test_acceptance_by_head(folder: Path) -> None:
    rows = json.loads((latest(folder, "eval") / "acceptance.json").read_text())["heads"]
    assert [(row["head"], row["temperature"]) for row in rows] == [(1, 0.0), (2, 0.0), (1, 1.0), (2, 1.0)]
    for row in rows:
        assert 0 <= row["top1"]["low"] <= row["top1"]["value"] <= row["top5"]["value"] <= 1


def test_the_benchmark_finds_the_outputs_unchanged(folder: Path) -> None:
    rows = json.loads((latest(folder, "bench") / "bench.json").read_text())["bench"]
    drafted = [row for row in rows if row["draft"] == "distilled"]
    assert [(row["temperature"], row["gamma"], row["tree"]) for row in drafted] == [
        (temperature, gamma, tree) for temperature in (0.0, 1.0) for gamma, tree in ((1, None), (2, None), (2, "2x1"))
    ]
    assert all(row["lossless"] for row in rows)
    assert all(row["block_efficiency"] >= 1 for row in drafted)


def test_the_same_command_again_does_nothing(folder: Path) -> None:
    again = run(folder)
    assert again.returncode == 0, again.stderr
    assert again.stdout.count("reused") == 4


def test_draft_chains_and_trees_heads_and_ngrams_in_one_benchmark(folder: Path) -> None:
    heads = str(latest(folder, "distill").resolve() / "draft")
    done = run(
        folder, "stages=[corpus,distill,bench]", f"bench.medusa_heads={heads}", "bench.trees=[2x1]", "bench.ngram_gammas=[4]",
        "bench.undistilled_gammas=[]", "bench.temperatures=[0.0]", experiment="tiny",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads((latest(folder, "bench") / "bench.json").read_text())
    ways = [(row["draft"], row["gamma"], row["tree"]) for row in result["bench"] if row["backend"] == "native"]
    of_each = [(1, None), (2, None), (2, "2x1")]
    assert ways == [
        ("none", 0, None), *(("distilled", *way) for way in of_each), *(("medusa", *way) for way in of_each), ("ngram", 4, None)
    ]  # fmt: skip
    assert all(row["lossless"] for row in result["bench"])
    minutes = result["settings"]["training_minutes"]
    assert minutes["distilled"] >= 0 and minutes["medusa"] >= 0
    assert "what proposes" in done.stdout


def test_the_search_for_a_tree_ends_with_a_setting(folder: Path) -> None:
    done = run(folder, "tree_search.max_nodes=4", "tree_search.max_seconds=5", module="pipeline.tree_search")
    assert done.returncode == 0, done.stderr
    (result,) = (folder / "artifacts" / "tree_search").glob("*/tree_search.json")
    written = json.loads(result.read_text())
    assert done.stdout.strip().splitlines()[-1] == f"use: {written['setting']}"
    assert len(written["times"]["heads_ms"]) == len(written["acceptance_by_rank"]) == 2
    assert any(row["way"].startswith("tree dynamic") for row in written["measured"])
