"""Runs in MLflow: one parent per invocation, one child per stage that did work.

The disk is the truth and this is a view of it: whatever goes wrong with the server becomes one warning, after which
the run goes on untracked. mlflow is imported when tracking starts (`pipeline/tracking_connect.py`).
"""

import json
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self
from urllib.parse import urlsplit

from pipeline.processes import is_alive, process_mark
from pipeline.schema import Config, TrackingConfig
from pipeline.store import UNFINISHED
from pipeline.tracker import Tracker, flatten
from pipeline.tracking_connect import connect, one_at_a_time, prepare_environment
from pipeline.tracking_guard import never_fatal, status_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from mlflow import MlflowClient

MAX_BATCH = 100
PARENT_TAG = "mlflow.parentRunId"
TAG_GROUP = "draftsmith.group"
TAG_HOST, TAG_PROCESS = "draftsmith.host", "draftsmith.process"


@contextmanager
def open_tracker(config: Config) -> Iterator[Tracker]:
    """The tracker of one invocation. Its parent run ends as the `with` block does."""
    if not config.tracking.enabled:
        yield Tracker()
        return
    with MlflowTracker(config) as tracker:
        yield tracker


def process_tags() -> dict[str, str]:
    """Whose run it is: by these, a run is told from one whose process was killed."""
    return {TAG_HOST: socket.gethostname(), TAG_PROCESS: process_mark(os.getpid())}


class MlflowTracker(Tracker):
    """Logs through `MlflowClient` with explicit run ids, so nothing depends on mlflow's global state.

    A context manager, whose end is its run's end: finished, failed or killed.
    """

    client: "MlflowClient | None"

    def __init__(self, config: Config) -> None:
        self.settings: TrackingConfig = config.tracking
        self.parent_id = self.run_id = self.experiment_id = ""
        prepare_environment(self.settings.timeout_s)
        with one_at_a_time(self.settings.uri):
            self.client = connect(self.settings)
            self._open(config)

    @property
    def _client(self) -> "MlflowClient":
        assert self.client is not None
        return self.client

    @never_fatal
    def _open(self, config: Config) -> None:
        self.experiment_id = self._find_experiment(config)
        self._end_dead_runs()
        name = self.settings.run_name or f"{config.target.name}-{time.strftime('%Y%m%d-%H%M%S')}"
        tags = process_tags()
        if self.settings.parent_run is not None:
            tags[PARENT_TAG] = self.settings.parent_run
        self.parent_id = self.run_id = self._client.create_run(
            self.experiment_id, tags=tags, run_name=name
        ).info.run_id
        self._log_params(flatten(asdict(config)))

    def _find_experiment(self, config: Config) -> str:
        found = self._client.get_experiment_by_name(self.settings.experiment)
        if found is not None:
            return str(found.experiment_id)
        # A database names no place for files, and mlflow would make ./mlruns; a server has its own place.
        is_database = urlsplit(self.settings.uri).scheme not in ("http", "https", "databricks")
        place = (Path(config.artifacts_dir).absolute() / "mlflow").as_uri() if is_database else None
        from mlflow.exceptions import MlflowException

        try:
            return str(self._client.create_experiment(self.settings.experiment, artifact_location=place))
        except MlflowException:  # another process may have been quicker
            found = self._client.get_experiment_by_name(self.settings.experiment)
            if found is None:
                raise
            return str(found.experiment_id)

    def _end_dead_runs(self) -> None:
        """Runs of this machine whose process was killed would stay RUNNING for ever."""
        query = f"attributes.status = 'RUNNING' and tags.`{TAG_HOST}` = '{socket.gethostname()}'"
        for run in self._client.search_runs([self.experiment_id], query):
            if not is_alive(run.data.tags.get(TAG_PROCESS, "")):
                self._client.set_terminated(run.info.run_id, "KILLED")

    def _log_params(self, params: Mapping[str, str]) -> None:
        from mlflow.entities import Param

        entries = [Param(key, value) for key, value in params.items()]
        for start in range(0, len(entries), MAX_BATCH):
            self._client.log_batch(self.run_id, params=entries[start : start + MAX_BATCH])

    @contextmanager
    def stage(self, name: str, fingerprint: str) -> Iterator[None]:
        self._open_stage(name, fingerprint)
        try:
            yield
        except BaseException as error:
            self._close_stage(status_of(error))
            raise
        self._close_stage("FINISHED")

    @never_fatal
    def _open_stage(self, name: str, fingerprint: str) -> None:
        tags = {PARENT_TAG: self.parent_id, "stage": name, "fingerprint": fingerprint, **process_tags()}
        self.run_id = self._client.create_run(self.experiment_id, tags=tags, run_name=name).info.run_id

    @never_fatal
    def _close_stage(self, status: str) -> None:
        self._client.set_terminated(self.run_id, status)
        self.run_id = self.parent_id

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end("FINISHED" if error is None else status_of(error))

    @never_fatal
    def _end(self, status: str) -> None:
        self._client.set_terminated(self.parent_id, status)

    @never_fatal
    def log_metrics(self, metrics: Mapping[str, float], step: int = 0) -> None:
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        entries = [Metric(key, float(value), now_ms, step) for key, value in metrics.items()]
        for start in range(0, len(entries), MAX_BATCH):
            self._client.log_batch(self.run_id, metrics=entries[start : start + MAX_BATCH])

    @never_fatal
    def log_tags(self, tags: Mapping[str, str]) -> None:
        for name, value in tags.items():
            self._client.set_tag(self.run_id, name, value)

    @never_fatal
    def log_figure(self, figure: "Figure", name: str) -> None:
        self._client.log_figure(self.run_id, figure, name)

    @never_fatal
    def log_text(self, text: str, name: str) -> None:
        self._client.log_text(self.run_id, text, name)

    @never_fatal
    def log_reference(self, name: str, path: Path) -> None:
        self._client.set_tag(self.run_id, f"artifact.{name}", _uri(path))

    @never_fatal
    def log_corpus(self, folder: Path, *, digest: str, num_rows: int) -> None:
        from mlflow.entities import Dataset, DatasetInput, InputTag

        dataset = Dataset(
            name="corpus",
            digest=digest[:36],
            source_type="local",
            source=json.dumps({"uri": _uri(folder)}),
            profile=json.dumps({"num_rows": num_rows}),
        )
        self._client.log_inputs(
            self.run_id, [DatasetInput(dataset, tags=[InputTag("mlflow.data.context", "training")])]
        )

    @never_fatal
    def log_draft(self, folder: Path, *, name: str, figures: Mapping[str, float]) -> None:
        import mlflow
        from mlflow.entities import LoggedModelOutput
        from mlflow.exceptions import MlflowException

        where = _uri(folder)
        model = mlflow.create_external_model(
            name=_model_name(name),
            source_run_id=self.run_id,
            experiment_id=self.experiment_id,
            model_type="draft",
            tags={"weights": where},
            params={key: f"{value:.6g}" for key, value in figures.items()},
        )
        self._client.log_outputs(self.run_id, [LoggedModelOutput(model.model_id, step=0)])
        registered = self.settings.registered_model or _model_name(name)
        try:
            self._client.create_registered_model(registered)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        is_server = urlsplit(self.settings.uri).scheme in ("http", "https")
        source = f"models:/{model.model_id}" if is_server else where  # a server refuses sources on a client's disk
        version = self._client.create_model_version(
            registered,
            source=source,
            run_id=self.run_id,
            model_id=model.model_id,
            tags={"weights": where, "logged_model": model.model_id},
            await_creation_for=0,
        )
        self._client.set_logged_model_tags(
            model.model_id, {"registered_as": f"{registered} version {version.version}"}
        )


def _uri(path: Path) -> str:
    """Where it will lie: a stage that logs its work folder does so before the folder gets its plain name."""
    absolute = path.absolute()
    return Path(*(part.removesuffix(UNFINISHED) for part in absolute.parts)).as_uri()


def _model_name(name: str) -> str:
    """Model names may not hold these characters."""
    return "".join("-" if character in "/:.%\"' " else character for character in name)
