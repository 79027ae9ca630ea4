"""Several configurations one after the other, each through the pipeline in a process of its own.

A process of its own starts each with the same memory and the same random state, and takes no other one with it when it is
killed. Finished work is found by its fingerprint, so the same command again runs only what is missing.
"""

import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pipeline.commands import compose_config
from pipeline.errors import EXIT_INTERRUPTED
from pipeline.input_checks import check_inputs
from pipeline.models import ModelRef, resolve_target
from pipeline.schema import Config
from pipeline.stages import input_revisions, stage_fingerprints
from pipeline.store import Store


class Runner(Protocol):
    """Takes a trial through some stages, as `run_trial` does."""

    def __call__(self, trial: "Trial", stages: Sequence[str], *, parent_run: str = "") -> None: ...


class TrialFailed(Exception):
    """The process of one trial ended with another exit code than 0."""


@dataclass(frozen=True)
class Trial:
    """One configuration. `folders` are the places of its finished stages, whether they are there yet or not."""

    name: str
    overrides: tuple[str, ...]
    config: Config
    fingerprints: Mapping[str, str]
    folders: Mapping[str, Path]

    def is_finished(self, stages: Iterable[str]) -> bool:
        """Whether all of these stages have been done for this configuration."""
        store = Store(Path(self.config.artifacts_dir))
        return all(store.finished(stage, self.fingerprints[stage]) is not None for stage in stages)


def plan_trials(overrides_of: Mapping[str, Sequence[str]]) -> list[Trial]:
    """A trial for each name, all checked, so that a mistake in the last one is found before the first one runs.

    Raises:
        ValueError: a configuration that cannot work, named with its trial.
    """
    targets: dict[str, ModelRef] = {}
    trials = []
    for name, overrides in overrides_of.items():
        try:
            config = compose_config(overrides)
            key = f"{config.target} {config.artifacts_dir}"
            if key not in targets:
                targets[key] = resolve_target(config)
            check_inputs(config)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        fingerprints = stage_fingerprints(config, input_revisions(config, targets[key]))
        store = Store(Path(config.artifacts_dir))
        folders = {stage: store.folder(stage, print_) for stage, print_ in fingerprints.items()}
        trials.append(Trial(name, tuple(overrides), config, fingerprints, folders))
    return trials


def run_trial(trial: Trial, stages: Sequence[str], *, parent_run: str = "") -> None:
    """Run these stages of the trial, or nothing when they are finished. Its output goes where this process's goes.

    Args:
        parent_run: MLflow run that the trial's own run is put under.

    Raises:
        TrialFailed: its process failed. KeyboardInterrupt: it was interrupted.
    """
    if trial.is_finished(stages):
        return
    words = [*trial.overrides, f"stages=[{','.join(stages)}]", f"tracking.run_name='{trial.name}'"]
    if parent_run:
        words.append(f"tracking.parent_run='{parent_run}'")
    done = subprocess.run([sys.executable, "-m", "pipeline", *words], check=False)
    if done.returncode == EXIT_INTERRUPTED:
        raise KeyboardInterrupt
    if done.returncode != 0:
        raise TrialFailed(f"exit code {done.returncode}, see its message above")
    if not trial.is_finished(stages):
        raise TrialFailed("its stages ended under other fingerprints than planned: were files changed meanwhile?")
