"""One run in MLflow above those of several invocations, such as the variants of an ablation."""

from collections.abc import Iterator
from contextlib import contextmanager

from pipeline.schema import Config
from pipeline.tracking import TAG_GROUP, MlflowTracker, process_tags
from pipeline.tracking_guard import never_fatal


class GroupTracker(MlflowTracker):
    """Its run's id is `parent_id`, empty without tracking. A group with the same key goes on in the same run."""

    def __init__(self, config: Config, *, name: str, key: str) -> None:
        self.name, self.key = name, key
        super().__init__(config)

    @never_fatal
    def _open(self, config: Config) -> None:
        self.experiment_id = self._find_experiment(config)
        self._end_dead_runs()
        found = self._client.search_runs(
            [self.experiment_id], f"tags.`{TAG_GROUP}` = '{self.key}'", max_results=1
        )
        tags = {**process_tags(), TAG_GROUP: self.key}
        if not found:
            self.parent_id = self.run_id = self._client.create_run(
                self.experiment_id, tags=tags, run_name=self.name
            ).info.run_id
            return
        self.parent_id = self.run_id = found[0].info.run_id
        self._client.update_run(self.run_id, status="RUNNING")
        for tag, value in tags.items():
            self._client.set_tag(self.run_id, tag, value)


@contextmanager
def open_group(config: Config, *, name: str, key: str) -> Iterator[GroupTracker | None]:
    """The group's run, which ends as the `with` block does; None when tracking is off."""
    if not config.tracking.enabled:
        yield None
        return
    with GroupTracker(config, name=name, key=key) as tracker:
        yield tracker
