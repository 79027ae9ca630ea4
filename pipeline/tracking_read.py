"""Reading runs back from MLflow. `pipeline/tracking.py` writes them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pipeline.schema import TrackingConfig
from pipeline.tracking import PARENT_TAG, TAG_GROUP
from pipeline.tracking_connect import prepare_environment


@dataclass(frozen=True)
class RunRecord:
    """One invocation. `group` is the name of the run that it lies under, such as an ablation; "" where there is none.

    `curve`: held-out acceptance_rate over optimiser steps, of a training that this run did itself.
    """

    run_id: str
    name: str
    group: str
    status: str
    started: datetime
    metrics: Mapping[str, float]
    params: Mapping[str, str]
    tags: Mapping[str, str]
    curve: list[tuple[int, float]] = field(default_factory=list)


def read_runs(settings: TrackingConfig, *, max_runs: int = 1000) -> list[RunRecord]:
    """The invocations of `tracking.experiment`, newest first.

    Raises:
        ValueError: the store cannot be read, or has no such experiment.
    """
    database = settings.uri.removeprefix("sqlite:///").partition("?")[0]
    if database != settings.uri and not Path(database).is_file():  # mlflow would make one to look into
        raise ValueError(f"tracking.uri={settings.uri}: no such database, so there are no runs yet; `make distill` makes one")
    prepare_environment(settings.timeout_s)
    import mlflow
    from mlflow.exceptions import MlflowException

    try:
        client = mlflow.MlflowClient(settings.uri, settings.uri)
        experiment = client.get_experiment_by_name(settings.experiment)
        if experiment is None:
            known = sorted(one.name for one in client.search_experiments())
            raise ValueError(
                f"tracking.experiment={settings.experiment}: {settings.uri} has only {known}; `make distill` records there"
            )
        runs = client.search_runs(
            [experiment.experiment_id], order_by=["attributes.start_time DESC"], max_results=50 * max_runs
        )
    except (MlflowException, OSError) as error:
        raise ValueError(f"tracking.uri={settings.uri}: cannot be read: {error}") from error
    names = {run.info.run_id: run.info.run_name for run in runs}
    trainings = {run.data.tags.get(PARENT_TAG): run for run in runs if run.data.tags.get("stage") == "distill"}
    invocations = [run for run in runs if "stage" not in run.data.tags and TAG_GROUP not in run.data.tags]
    return [_record(client, run, names, trainings.get(run.info.run_id)) for run in invocations[:max_runs]]


def _record(client: Any, run: Any, names: Mapping[str, str], training: Any) -> RunRecord:
    curve: list[tuple[int, float]] = []
    if training is not None:
        history = client.get_metric_history(training.info.run_id, "acceptance_rate")
        curve = sorted((metric.step, metric.value) for metric in history)
    return RunRecord(
        run_id=run.info.run_id,
        name=run.info.run_name,
        group=names.get(run.data.tags.get(PARENT_TAG, ""), ""),
        status=run.info.status,
        started=datetime.fromtimestamp(run.info.start_time / 1000, tz=UTC),
        metrics=dict(run.data.metrics),
        params=dict(run.data.params),
        tags=dict(run.data.tags),
        curve=curve,
    )
