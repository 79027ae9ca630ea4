"""Pages go to MLflow as files of the stage's run."""

from pathlib import Path

import mlflow
from mlflow import MlflowClient

from pipeline.tracking import open_tracker
from tests.conftest import Composer


def test_a_page_is_an_artifact_of_its_stages_run(make_config: Composer, tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    config = make_config("+experiment=tiny", f"tracking.uri={uri}", f"artifacts_dir={tmp_path}/artifacts")
    try:
        with open_tracker(config) as tracker, tracker.stage("eval", "f" * 64):
            tracker.log_text("<p>é</p>", "viewer.html")
        client = MlflowClient(uri)
        experiment = client.get_experiment_by_name("draftsmith")
        assert experiment is not None
        (run,) = client.search_runs([experiment.experiment_id], "tags.stage = 'eval'")
        file = client.download_artifacts(run.info.run_id, "viewer.html", dst_path=str(tmp_path))
        assert Path(file).read_text(encoding="utf-8") == "<p>é</p>"
    finally:
        mlflow.set_tracking_uri(None)
        mlflow.set_registry_uri(None)
