"""Walks the list of stages: takes finished work, goes on with unfinished work, records and reports."""

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from rich.console import Console
from transformers.utils import logging as transformers_logging

from pipeline.console import result_console
from pipeline.context import StageContext
from pipeline.errors import GateFailure
from pipeline.gate import gate_failures
from pipeline.models import ModelRef, resolve_target
from pipeline.prediction import prediction_table
from pipeline.preflight import check_inputs
from pipeline.remote_store import RemoteStore
from pipeline.report import Report, acceptance_table, bench_table, read_result
from pipeline.schema import Config
from pipeline.stages import STAGES, Stage, config_subtree, input_revisions, load_function, stage_fingerprints
from pipeline.store import StageRecord, Store, git_commit, installed_versions
from pipeline.summary import record_summary
from pipeline.tracker import Tracker
from pipeline.tracking import open_tracker

MAX_TAG_CHARS = 5000  # of MLflow's servers


def run_stages(config: Config) -> dict[str, Path]:
    """Run the stages that `config.stages` names, or take their finished work; return every used folder by stage.

    Raises:
        ValueError: bad input, found before the first stage works.
        GateFailure: a value of the `gate` group was not reached.
    """
    transformers_logging.disable_progress_bar()  # one for each small file that is read
    store = Store(Path(config.artifacts_dir))
    remote = None if config.artifacts_store is None else RemoteStore(config.artifacts_store)
    if remote is not None and remote.is_folder(Path(config.artifacts_dir)):
        raise ValueError(f"artifacts_store={config.artifacts_store!r} is artifacts_dir itself: name another place, or set it to null")
    check_inputs(config)
    run = _Run(config, store, resolve_target(config), remote)
    return run.walk()


def _conclude(folder: Path, config: Config, console: Console, tracker: Tracker) -> None:
    """Say what was measured, hold it against the gate, and record on the run of the invocation which values it failed.

    Raises:
        GateFailure: the gate was missed.
    """
    report = cast(Report, read_result(folder, "report.json"))
    console.print(acceptance_table(report["acceptance_rate"]))
    console.print(bench_table(report["bench"]))
    if report["prediction"]:
        console.print(prediction_table(report["prediction"]))
    console.print(
        f"draft: {folder / report['draft']['path']}\nreport: {folder / 'report.json'}", soft_wrap=True
    )
    failures = gate_failures(report, config.gate)
    tracker.log_tags({"gate": f"failed: {'; '.join(failures)}"[:MAX_TAG_CHARS] if failures else "passed"})
    if failures:
        raise GateFailure("\n".join(failures))


class _Run:
    """One walk over the list."""

    def __init__(self, config: Config, store: Store, target: ModelRef, remote: RemoteStore | None) -> None:
        self.config, self.store, self.target, self.remote = config, store, target, remote
        self.console = result_console()
        self.values = asdict(config)
        self.revisions = input_revisions(config, target)
        self.fingerprints = stage_fingerprints(config, self.revisions)
        self.folders: dict[str, Path] = {}

    def walk(self) -> dict[str, Path]:
        chosen = [stage for stage in STAGES if stage.name in self.config.stages]
        needed = self._upstream_of(chosen)
        self._require_finished([stage for stage in needed if stage not in chosen])
        with open_tracker(self.config) as tracker:
            for stage in needed:
                self.folders[stage.name] = (
                    self._take(stage, tracker) if stage in chosen else self._folder(stage)
                )
                self.store.link_latest(stage.name, self.folders[stage.name])
            record_summary(tracker, self.config, self.folders)
            if "export" in self.folders:
                _conclude(self.folders["export"], self.config, self.console, tracker)
        return self.folders

    def _upstream_of(self, chosen: list[Stage]) -> list[Stage]:
        names = {stage.name for stage in chosen}
        for stage in reversed(STAGES):
            if stage.name in names:
                names.update(stage.upstream)
        return [stage for stage in STAGES if stage.name in names]

    def _require_finished(self, stages: list[Stage]) -> None:
        missing = [stage.name for stage in stages if not self._is_there(stage)]
        if missing:
            raise ValueError(
                f"stages={self.config.stages} build on {missing}, not finished for this configuration: "
                f"add them, as in stages=[{','.join(missing + self.config.stages)}]"
            )

    def _folder(self, stage: Stage) -> Path:
        return self.store.folder(stage.name, self.fingerprints[stage.name])

    def _take(self, stage: Stage, tracker: Tracker) -> Path:
        if not self._reuse(stage):
            with self.store.lock(stage.name, self.fingerprints[stage.name]):
                # Another process may have made it while we waited.
                if not self._reuse(stage) and not self._fetch(stage):
                    self._work(stage, tracker)
        self._publish(stage)
        return self._folder(stage)

    def _is_there(self, stage: Stage) -> bool:
        fingerprint = self.fingerprints[stage.name]
        if self.store.finished(stage.name, fingerprint) is not None:
            return True
        if self.remote is None:
            return False
        with self.store.lock(stage.name, fingerprint):
            return self._reuse(stage) or self._fetch(stage)

    def _reuse(self, stage: Stage) -> bool:
        record = self.store.finished(stage.name, self.fingerprints[stage.name])
        if record is not None:
            self.console.print(
                f"[green]{stage.name:<10}[/] reused   {self._shown(stage)} (took {record.seconds:.0f} s)"
            )
        return record is not None

    def _fetch(self, stage: Stage) -> bool:
        is_there = self.remote is not None and self.remote.fetch(
            stage.name, self.fingerprints[stage.name], self._folder(stage)
        )
        if is_there:
            self.console.print(f"[green]{stage.name:<10}[/] fetched  {self._shown(stage)}")
        return is_there

    def _publish(self, stage: Stage) -> None:
        """Also what an earlier run made, and could not store."""
        if self.remote is not None and self.remote.publish(
            stage.name, self.fingerprints[stage.name], self._folder(stage)
        ):
            self.console.print(f"[green]{stage.name:<10}[/] stored   {self._shown(stage)}")

    def _work(self, stage: Stage, tracker: Tracker) -> None:
        fingerprint = self.fingerprints[stage.name]
        work_dir = self.store.work_dir(stage.name, fingerprint)
        resumed = work_dir.is_dir() and any(work_dir.iterdir())
        work_dir.mkdir(exist_ok=True)
        self.console.print(
            f"[cyan]{stage.name:<10}[/] {'resumes' if resumed else 'starts'}  {work_dir.relative_to(self.store.root)}"
        )
        started = time.monotonic()
        with tracker.stage(stage.name, fingerprint):
            inputs = {name: self.folders[name] for name in stage.upstream}
            figures = load_function(stage.function)(
                StageContext(self.config, work_dir, inputs, tracker, self.target)
            )
            tracker.log_metrics(
                {key: value for key, value in figures.items() if isinstance(value, (int, float))}
            )
            seconds = time.monotonic() - started
            folder = self.store.finish(self._record(stage, figures, seconds, resumed=resumed))
            tracker.log_reference(stage.name, folder)
        self.console.print(f"[green]{stage.name:<10}[/] done     {self._shown(stage)} in {seconds:.0f} s")

    def _record(self, stage: Stage, figures: dict[str, Any], seconds: float, *, resumed: bool) -> StageRecord:
        return StageRecord(
            stage=stage.name,
            stage_version=stage.version,
            fingerprint=self.fingerprints[stage.name],
            config=config_subtree(self.values, stage.keys_read(self.values)),
            inputs={name: self.fingerprints[name] for name in stage.upstream}
            | {f"{k} revision": v for k, v in self.revisions.items()},
            figures=figures,
            seconds=round(seconds, 3),
            resumed=resumed,
            versions=installed_versions(),
            git_commit=git_commit(),
        )

    def _shown(self, stage: Stage) -> str:
        return f"{stage.name}/{self.fingerprints[stage.name][:12]}"
