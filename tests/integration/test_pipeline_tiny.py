"""The whole pipeline on seeded random models, through the entry point: once, again, and killed in every stage."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from pipeline.corpus import read_corpus
from pipeline.schema import STAGE_NAMES
from tests.conftest import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

#: A part of a stage's work that is on disk when the process is killed; without one it is killed at the end of its work.
PARTS = {"corpus": "shards/*.parquet", "distill": "checkpoints/checkpoint-*/trainer_state.json"}

#: Runs the entry point, and kills it with SIGKILL inside the stage of its first argument: at the first part on disk, or
#: when the work is done and the folder does not have its plain name yet.
KILLED_RUN = """
import os, signal, sys, threading, time
from pipeline import __main__ as entry, runner

stage, pattern = sys.argv[1], sys.argv[2]
del sys.argv[1:3]
load = runner.load_function

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def watch(folder):
    while not list(folder.glob(pattern)):
        time.sleep(0.002)
    die()

def load_deadly(reference):
    function = load(reference)
    def work(context):
        if context.work_dir.parent.name == stage:
            if pattern:
                threading.Thread(target=watch, args=(context.work_dir,), daemon=True).start()
            function(context)
            die()
        return function(context)
    return work

runner.load_function = load_deadly
entry.main()
"""


@dataclass(frozen=True)
class Ran:
    folder: Path
    done: subprocess.CompletedProcess[str]
    seconds: float

    def latest(self, stage: str) -> Path:
        return (self.folder / "artifacts" / "latest" / stage).resolve()

    def corpus_rows(self) -> list[dict[str, object]]:
        return list(read_corpus(self.latest("corpus")))

    def weights(self) -> dict[str, str]:
        files = sorted((self.latest("export") / "draft").glob("*.safetensors")) + sorted(
            (self.latest("distill") / "draft").glob("*.safetensors")
        )
        return {
            str(file.relative_to(self.folder)): hashlib.sha256(file.read_bytes()).hexdigest()
            for file in files
        }


def run(folder: Path, *arguments: str, command: tuple[str, ...] = ("-m", "pipeline")) -> Ran:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, *command, "+experiment=tiny", *arguments],
        cwd=folder,
        env=environment,
        text=True,
        capture_output=True,
        timeout=400,
        check=False,
    )
    return Ran(folder, done, time.monotonic() - started)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    ran = run(tmp_path_factory.mktemp("undisturbed"))
    assert ran.done.returncode == 0, ran.done.stderr
    return ran


def test_one_command_gives_a_measured_draft(undisturbed: Ran) -> None:
    report = json.loads((undisturbed.latest("export") / "report.json").read_text())
    assert {"target", "draft", "machine", "corpus", "minutes", "acceptance_rate", "bench"} <= report.keys()
    assert report["corpus"]["num_response_tokens"] > 0
    rates = {(row["draft"], row["temperature"], row["sampler"]): row for row in report["acceptance_rate"]}
    assert {
        (draft, temperature, sampler)
        for draft in ("undistilled", "distilled")
        for temperature in (0.0, 1.0)
        for sampler in ("probabilistic", "greedy")
    } == rates.keys()
    assert all(0 <= row["low"] <= row["value"] <= row["high"] <= 1 for row in rates.values())
    native = {
        (row["draft"], row["temperature"], row["gamma"])
        for row in report["bench"]
        if row["backend"] == "native"
    }
    assert {(draft, 0.0, gamma) for draft in ("undistilled", "distilled") for gamma in (1, 2)} < native
    assert ("none", 0.0, 0) in native
    assert all(row["lossless"] is not False for row in report["bench"])
    assert (undisturbed.latest("export") / "draft" / "model.safetensors").is_file()
    assert "acceptance_rate" in undisturbed.done.stdout


def test_the_run_leaves_only_what_is_listed(undisturbed: Ran) -> None:
    assert {path.name for path in undisturbed.folder.iterdir()} == {"artifacts", "mlflow.db"}
    assert {path.name for path in (undisturbed.folder / "artifacts" / "latest").iterdir()} == set(STAGE_NAMES)
    assert not list(undisturbed.folder.glob("artifacts/*/*.incomplete"))
    assert not list(undisturbed.folder.rglob("*.bin"))
    assert not list((undisturbed.latest("export")).rglob("*.pt"))


def test_every_stage_is_a_run_in_mlflow(undisturbed: Ran) -> None:
    from mlflow import MlflowClient

    uri = f"sqlite:///{undisturbed.folder}/mlflow.db"
    client = MlflowClient(uri, registry_uri=uri)  # left out, it is that of the last test in this process
    [experiment] = client.search_experiments(filter_string="name = 'draftsmith'")
    runs = client.search_runs([experiment.experiment_id])
    assert {run.info.status for run in runs} == {"FINISHED"}
    children = {run.data.tags["stage"]: run for run in runs if "mlflow.parentRunId" in run.data.tags}
    assert children.keys() == set(STAGE_NAMES)
    for stage, child in children.items():
        record = json.loads((undisturbed.latest(stage) / "stage.json").read_text())
        assert child.data.tags["fingerprint"] == record["fingerprint"]
    assert children["corpus"].inputs.dataset_inputs[0].dataset.name == "corpus"
    assert len(client.search_registered_models()) == 1
    assert not list((undisturbed.folder / "artifacts" / "mlflow").rglob("*.safetensors"))


def test_the_same_command_again_reuses_everything(undisturbed: Ran) -> None:
    before = {stage: (undisturbed.latest(stage) / "stage.json").stat().st_mtime_ns for stage in STAGE_NAMES}
    again = run(undisturbed.folder)
    assert again.done.returncode == 0, again.done.stderr
    assert again.done.stdout.count(" reused ") == len(STAGE_NAMES)
    assert again.seconds < 60
    assert {stage: (again.latest(stage) / "stage.json").stat().st_mtime_ns for stage in STAGE_NAMES} == before


def test_a_missed_gate_ends_with_3_and_keeps_the_artifacts(undisturbed: Ran) -> None:
    missed = run(undisturbed.folder, "gate.min_speedup=1000")
    assert missed.done.returncode == 3, missed.done.stderr
    assert "gate.min_speedup=1000" in missed.done.stderr
    assert (missed.latest("export") / "report.json").is_file()


def test_killed_in_every_stage_the_result_is_the_same(undisturbed: Ran, tmp_path: Path) -> None:
    """speculators 716 generated everything again, speculators 900 came back with another learning rate."""
    for stage in STAGE_NAMES:
        killed = run(tmp_path, command=("-c", KILLED_RUN, stage, PARTS.get(stage, "")))
        assert killed.done.returncode == -signal.SIGKILL, killed.done.stderr
        assert list((tmp_path / "artifacts" / stage).glob("*.incomplete")), (
            f"{stage} was not killed in its work"
        )
        kept = [file for file in (tmp_path / "artifacts" / stage).rglob("*") if file.is_file()]
        assert kept or stage not in PARTS
    resumed = run(tmp_path)
    assert resumed.done.returncode == 0, resumed.done.stderr
    assert resumed.done.stdout.count(" reused ") == len(STAGE_NAMES) - 1
    for stage in STAGE_NAMES:
        assert json.loads((resumed.latest(stage) / "stage.json").read_text())["resumed"], stage
        assert resumed.latest(stage).name == undisturbed.latest(stage).name
    assert resumed.corpus_rows() == undisturbed.corpus_rows()
    assert resumed.weights() == undisturbed.weights()
    assert resumed.weights()


def test_killed_at_any_moment_the_result_is_the_same(undisturbed: Ran, tmp_path: Path) -> None:
    """Not only where a stage is tidy: the corpus and the training are killed several times, at moments of their own."""
    for part in (
        lambda folder: folder.glob("corpus/*.incomplete/*"),
        lambda folder: folder.glob("distill/*.incomplete/*"),
    ):
        _kill_when(tmp_path, part)
    resumed = run(tmp_path)
    assert resumed.done.returncode == 0, resumed.done.stderr
    assert resumed.corpus_rows() == undisturbed.corpus_rows()
    assert resumed.weights() == undisturbed.weights()


def _kill_when(folder: Path, part: Callable[[Path], object]) -> None:
    """Start a run and kill it as soon as `part` of the artifacts is there; a run that is quicker ends by itself."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-m", "pipeline", "+experiment=tiny"],
        cwd=folder,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    while process.poll() is None and not list(part(folder / "artifacts")):  # type: ignore[call-overload]
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
