"""What a stage gets when it runs."""

from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from transformers import PreTrainedModel

from pipeline.models import ModelRef, load_causal_lm
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


def load_target(context: StageContext, *, dtype: Optional[str] = None) -> PreTrainedModel:
    """The target, as the configuration has it; in `dtype` where that is given."""
    settings = context.config.target
    return load_causal_lm(
        context.target.path, dtype=dtype or settings.dtype, trust_remote_code=settings.trust_remote_code
    )
