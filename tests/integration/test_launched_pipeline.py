"""The tiny recipe with its training launched on two processes, through the entry point."""

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch.testing import assert_close

from tests.conftest import ROOT

pytestmark = pytest.mark.slow

#: All of the recipe's 40 steps: its epochs end after 12.
TINY = ("+experiment=tiny", "train.num_epochs=20", "stages=[corpus,distill]")


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    command = [sys.executable, "-m", "pipeline", *TINY, *arguments]
    return subprocess.Popen(
        command, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def finish(process: subprocess.Popen[str]) -> None:
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifacts folder with the recipe's corpus and the draft that one process trains."""
    folder = tmp_path_factory.mktemp("one")
    finish(start(folder))
    return folder


@pytest.fixture
def corpus_only(one_process: Path, tmp_path: Path) -> Path:
    shutil.copytree(one_process / "artifacts", tmp_path / "artifacts", symlinks=True)
    shutil.rmtree(tmp_path / "artifacts" / "distill")
    return tmp_path


def logged_losses(folder: Path) -> list[tuple[int, float]]:
    """(step, loss) as MLflow has them, over all runs of the folder."""
    with sqlite3.connect(folder / "mlflow.db") as database:
        rows = database.execute("select step, value from metrics where key = 'loss' order by step, timestamp").fetchall()
    return [(int(step), float(value)) for step, value in rows]


def assert_same_losses(one: Path, other: Path) -> None:
    """Every loss is logged, also what was reported in the moment of a kill."""
    losses = dict(logged_losses(one))
    assert len(losses) == len(logged_losses(one)) == 4
    for step, value in logged_losses(other):
        assert value == pytest.approx(losses[step], abs=1e-5), step
    assert dict(logged_losses(other)).keys() == losses.keys()


def assert_same_draft(one: Path, other: Path) -> None:
    left, right = ((folder / "artifacts" / "latest" / "distill").resolve() for folder in (one, other))
    assert left.name == right.name  # how it is launched is no part of the fingerprint
    records = [json.loads((folder / "train.json").read_text()) for folder in (left, right)]
    assert [step for step, _ in records[0]["curve"]] == [step for step, _ in records[1]["curve"]]
    for (_, value), (_, other_value) in zip(records[0]["curve"], records[1]["curve"], strict=True):
        assert value == pytest.approx(other_value, abs=1e-4)
    assert records[0]["num_supervised_tokens"] == records[1]["num_supervised_tokens"]
    weights = [load_file(folder / "draft" / "model.safetensors") for folder in (left, right)]
    assert weights[0].keys() == weights[1].keys()
    for name, value in weights[0].items():
        assert_close(value, weights[1][name], atol=1e-4, rtol=0, msg=name)
    assert {path.name for path in right.iterdir()} == {path.name for path in left.iterdir()}


@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_two_processes_make_the_draft_that_one_makes(one_process: Path, corpus_only: Path, engine: str) -> None:
    finish(start(corpus_only, f"launch.engine={engine}", "launch.num_processes=2"))
    assert_same_draft(one_process, corpus_only)
    assert_same_losses(one_process, corpus_only)
    assert len(logged_losses(corpus_only)) == 4  # two processes train, one reports


def test_killed_and_gone_on_with_by_one_process(one_process: Path, corpus_only: Path) -> None:
    """The whole pipeline is killed; its processes end by themselves, and one process, started at once, takes up their checkpoint."""
    process = start(corpus_only, "launch.engine=fsdp", "launch.num_processes=2")
    distill = corpus_only / "artifacts" / "distill"
    deadline = time.monotonic() + 100
    while not list(distill.glob("*.incomplete/checkpoints/checkpoint-*")):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    finish(start(corpus_only))
    assert_same_draft(one_process, corpus_only)
    assert_same_losses(one_process, corpus_only)
    record = json.loads((distill.parent / "latest" / "distill" / "train.json").read_text())
    assert record["launch"] is None
