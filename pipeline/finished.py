"""What earlier runs left, for the commands that build on it: finished stage folders of a configuration."""

from collections.abc import Sequence
from pathlib import Path

from pipeline.context import StageContext
from pipeline.models import ModelRef
from pipeline.schema import Config
from pipeline.stages import input_revisions, stage_fingerprints
from pipeline.store import Store
from pipeline.tracker import Tracker


def finished_folders(config: Config, target: ModelRef, names: Sequence[str]) -> dict[str, Path]:
    """The folders of these stages, those that are finished for this configuration."""
    store = Store(Path(config.artifacts_dir))
    fingerprints = stage_fingerprints(config, input_revisions(config, target))
    return {
        name: store.folder(name, fingerprints[name])
        for name in names
        if store.finished(name, fingerprints[name]) is not None
    }


def finished_context(
    config: Config, target: ModelRef, names: Sequence[str], *, work_dir: Path, tracker: Tracker, way_out: str = ""
) -> StageContext:
    """A context as a stage behind these would get it.

    Raises:
        ValueError: one of them is not finished; `way_out` is what else the user can do.
    """
    folders = finished_folders(config, target, names)
    missing = [name for name in names if name not in folders]
    if missing:
        raise ValueError(
            f"{missing} not finished for this configuration in {config.artifacts_dir}: run it first, as in "
            f"stages=[{','.join(missing)}]{', ' + way_out if way_out else ''}"
        )
    return StageContext(config, work_dir, folders, tracker, target)
