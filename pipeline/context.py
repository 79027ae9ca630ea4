"""What a stage gets when it runs."""

from dataclasses import dataclass
from pathlib import Path

from pipeline.models import ModelRef
from pipeline.schema import Config
from pipeline.tracker import Tracker


@dataclass(frozen=True)
class StageContext:
    """All that a stage may read, and the one folder that it may write.

    `work_dir` holds what an earlier, killed attempt at the same work left behind: a stage looks
    there first and goes on from it. The folder is renamed when the stage is done, so a stage never
    stores its absolute path. `inputs` are the finished folders of the upstream stages, by name.
    """

    config: Config
    work_dir: Path
    inputs: dict[str, Path]
    tracker: Tracker
    target: ModelRef
