"""MLflow gets the whole story; without a server nothing but a warning is different."""

import logging
import multiprocessing
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import matplotlib.pyplot as plt
import mlflow
import pytest
from mlflow import MlflowClient
from mlflow.entities import Run

from pipeline import runner
from pipeline.context import StageContext
from pipeline.errors import GateFailure
from pipeline.models import ModelRef
from pipeline.schema import Config
from pipeline.stages import STAGES
from pipeline.store import write_json
from pipeline.tracker import MAX_PARAM_CHARS, Tracker, flatten
from pipeline.tracking import MlflowTracker, open_tracker
from tests.conftest import Composer
from tests.unit.pipeline.report_samples import make_report


@pytest.fixture(scope="module")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Making the tables takes seconds: once for all tests."""
    file = tmp_path_factory.mktemp("database") / "mlflow.db"
    MlflowClient(f"sqlite:///{file}").search_experiments()
    return file


@dataclass(frozen=True)
class Place:
    root: Path
    uri: str

    @property
    def overrides(self) -> tuple[str, ...]:
        return "+experiment=tiny", f"tracking.uri={self.uri}", f"artifacts_dir={self.root}/artifacts"

    def runs(self) -> list[Run]:
        client = MlflowClient(self.uri)
        experiment = client.get_experiment_by_name("draftsmith")
        assert experiment is not None
        return list(client.search_runs([experiment.experiment_id], order_by=["attributes.start_time ASC"]))


@pytest.fixture
def place(tmp_path: Path, empty_database: Path) -> Iterator[Place]:
    (tmp_path / "mlflow.db").write_bytes(empty_database.read_bytes())
    yield Place(tmp_path, f"sqlite:///{tmp_path}/mlflow.db")
    mlflow.set_tracking_uri(None)
    mlflow.set_registry_uri(None)


def test_a_parent_run_has_a_child_for_each_stage(make_config: Composer, place: Place) -> None:
    with open_tracker(make_config(*place.overrides, "loss=tv")) as tracker:
        with tracker.stage("corpus", "f" * 64):
            tracker.log_metrics({"num_rows": 3})
        with tracker.stage("distill", "e" * 64):
            tracker.log_metrics({"loss": 2.0}, 1)
            tracker.log_metrics({"loss": 1.0}, 2)
    parent, corpus, distill = place.runs()
    assert parent.data.params["loss.weights.tv"] == "1.0"
    assert parent.data.params["corpus.num_prompts"] == "32"
    assert [run.data.tags["mlflow.parentRunId"] for run in (corpus, distill)] == [parent.info.run_id] * 2
    assert corpus.data.tags["fingerprint"] == "f" * 64
    assert corpus.data.metrics == {"num_rows": 3.0}
    history = MlflowClient(place.uri).get_metric_history(distill.info.run_id, "loss")
    assert [(metric.step, metric.value) for metric in history] == [(1, 2.0), (2, 1.0)]
    assert {run.info.status for run in place.runs()} == {"FINISHED"}


def test_figures_references_and_the_corpus_are_on_the_stage_that_made_them(
    make_config: Composer, place: Place
) -> None:
    with open_tracker(make_config(*place.overrides)) as tracker, tracker.stage("corpus", "f" * 64):
        figure, _ = plt.subplots()
        tracker.log_figure(figure, "lengths.png")
        plt.close(figure)
        tracker.log_reference("corpus", place.root / "somewhere")
        tracker.log_corpus(place.root / "somewhere.incomplete", digest="f" * 64, num_rows=3)
    run = place.runs()[1]
    assert [file.path for file in MlflowClient(place.uri).list_artifacts(run.info.run_id)] == ["lengths.png"]
    assert list((place.root / "artifacts" / "mlflow").rglob("lengths.png"))
    assert run.data.tags["artifact.corpus"] == f"file://{place.root}/somewhere"
    dataset = run.inputs.dataset_inputs[0].dataset
    assert (dataset.name, dataset.digest) == ("corpus", "f" * 36)
    assert f'{place.root}/somewhere"' in dataset.source, (
        "the stage is not done yet, and its folder has its plain name then"
    )


def test_the_draft_is_logged_and_registered_without_a_copy(make_config: Composer, place: Place) -> None:
    folder = place.root / "draft"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    for _ in range(2):
        with open_tracker(make_config(*place.overrides)) as tracker, tracker.stage("export", "f" * 64):
            tracker.log_draft(folder, name="model/1b: draft", figures={"acceptance_rate_t0": 0.5})
    client = MlflowClient(place.uri)
    versions = client.search_model_versions("name = 'model-1b--draft'")
    assert sorted(int(version.version) for version in versions) == [1, 2]
    assert versions[0].source == folder.as_uri()
    [experiment] = client.search_experiments(filter_string="name = 'draftsmith'")
    model = client.search_logged_models([experiment.experiment_id])[0]
    assert model.tags["registered_as"] == "model-1b--draft version 2"
    assert versions[0].tags["logged_model"] == model.model_id
    assert model.params["acceptance_rate_t0"] == "0.5"
    assert model.tags["weights"] == folder.as_uri()
    assert list(place.root.rglob("*.safetensors")) == [folder / "model.safetensors"]


@pytest.mark.parametrize(("error", "status"), [(RuntimeError, "FAILED"), (KeyboardInterrupt, "KILLED")])
def test_a_broken_run_ends_as_what_it_was(
    make_config: Composer, place: Place, error: type[BaseException], status: str
) -> None:
    with (
        pytest.raises(error),
        open_tracker(make_config(*place.overrides)) as tracker,
        tracker.stage("corpus", "f" * 64),
    ):
        raise error
    assert [run.info.status for run in place.runs()] == [status, status]


def test_a_killed_runs_entries_are_closed_by_the_next_run(make_config: Composer, place: Place) -> None:
    MlflowTracker(make_config(*place.overrides))._open_stage("corpus", "f" * 64)  # and nobody closes it
    client = MlflowClient(place.uri)
    done = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True, check=True
    )
    for run in place.runs():
        client.set_tag(run.info.run_id, "draftsmith.process", f"{done.stdout.strip()}@1")
    with open_tracker(make_config(*place.overrides)):
        assert [run.info.status for run in place.runs()] == ["KILLED", "KILLED", "RUNNING"]
        with open_tracker(make_config(*place.overrides)):  # a living process keeps its entry
            assert [run.info.status for run in place.runs()] == ["KILLED", "KILLED", "RUNNING", "RUNNING"]


def test_an_unreachable_server_costs_one_warning(
    make_config: Composer, caplog: pytest.LogCaptureFixture
) -> None:
    started = time.monotonic()
    with caplog.at_level(logging.WARNING, "pipeline.tracking_connect"):
        config = make_config("+experiment=tiny", "tracking=server", "tracking.uri=http://127.0.0.1:9")
        with open_tracker(config) as tracker, tracker.stage("corpus", "f" * 64):
            tracker.log_metrics({"a": 1.0})
            tracker.log_draft(Path("draft"), name="draft", figures={})
    messages = [record.getMessage() for record in caplog.records if record.name.startswith("pipeline.tracking")]
    assert len(messages) == 1
    assert "127.0.0.1:9 cannot be reached" in messages[0]
    assert time.monotonic() - started < 10


def test_a_server_that_takes_the_connection_and_never_answers_costs_its_timeout_once(
    make_config: Composer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        caplog.at_level(logging.WARNING, "pipeline.tracking_guard"),
    ):
        uri = f"http://127.0.0.1:{silent.getsockname()[1]}"
        started = time.monotonic()
        with open_tracker(
            make_config("+experiment=tiny", "tracking=server", f"tracking.uri={uri}")
        ) as tracker:
            for step in range(50):
                tracker.log_metrics({"a": 1.0}, step)
    assert time.monotonic() - started < 20
    assert len([record for record in caplog.records if record.name == "pipeline.tracking_guard"]) == 1


def test_tracking_can_die_halfway(
    make_config: Composer, place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    with open_tracker(make_config(*place.overrides)) as tracker, tracker.stage("corpus", "f" * 64):
        (place.root / "mlflow.db").unlink()
        (place.root / "mlflow.db").mkdir()
        for file in place.root.glob("mlflow.db-*"):
            file.unlink()
        assert isinstance(tracker, MlflowTracker)
        tracker._client._tracking_client.store.engine.dispose()
        tracker.log_metrics({"a": 1.0})
        tracker.log_metrics({"a": 2.0}, 1)
    assert sum("goes on without tracking" in record.getMessage() for record in caplog.records) == 1


def test_off_records_nothing(make_config: Composer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with (
        open_tracker(make_config("+experiment=tiny", "tracking=off")) as tracker,
        tracker.stage("corpus", "f" * 64),
    ):
        assert type(tracker) is Tracker
        tracker.log_metrics({"a": 1.0})
    assert not list(tmp_path.iterdir())


def test_flatten_keeps_values_within_what_servers_take() -> None:
    flat = flatten({"a": {"b": [1, 2], "c": None, "empty": {}}, "d": "x" * 2000, "e": True})
    assert flat == {
        "a.b": "[1, 2]",
        "a.c": "null",
        "a.empty": "{}",
        "d": "x" * (MAX_PARAM_CHARS - 3) + "...",
        "e": "true",
    }


def test_processes_that_make_the_database_together_are_all_recorded(make_config: Composer, tmp_path: Path) -> None:
    """Each would add the same tables and columns, and go on without tracking when one is there already."""
    place = Place(tmp_path, f"sqlite:///{tmp_path}/mlflow.db")
    config = make_config(*place.overrides)
    processes = [multiprocessing.get_context("fork").Process(target=_track, args=(config,)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(100)
    assert [run.info.status for run in place.runs()] == ["FINISHED"] * 4


def _track(config: Config) -> None:
    with open_tracker(config):
        pass


def test_the_gate_is_on_the_run_with_what_it_failed(
    make_config: Composer, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(context: StageContext) -> dict[str, object]:
        write_json(context.work_dir / "report.json", {**make_report(), "prediction": []})
        return {}

    (export,) = (replace(stage, upstream=()) for stage in STAGES if stage.name == "export")
    monkeypatch.setattr(runner, "STAGES", (export,))
    monkeypatch.setattr(runner, "check_inputs", lambda config: None)
    monkeypatch.setattr(runner, "resolve_target", lambda config: ModelRef(path="somewhere", name="target", revision="abc"))
    monkeypatch.setattr(runner, "load_function", lambda reference: work)
    words = (*place.overrides, "stages=[export]")
    with pytest.raises(GateFailure, match=r"min_speedup=2\.0"):
        runner.run_stages(make_config(*words, "gate.min_speedup=2"))
    runner.run_stages(make_config(*words, "gate.min_speedup=1.1"))
    missed, passed = (run for run in place.runs() if "stage" not in run.data.tags)
    assert missed.info.status == "FAILED"
    assert missed.data.tags["gate"].startswith("failed: gate.min_speedup=2.0: the best measured speedup is 1.300")
    assert (passed.info.status, passed.data.tags["gate"]) == ("FINISHED", "passed")
