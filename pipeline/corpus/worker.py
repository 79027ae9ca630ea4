"""A further worker on a corpus that another process is writing: `python -m pipeline.corpus.worker <the same settings>`.

It answers rows that nobody else has, into the same folder, and ends when none are left; the process that runs the stage
counts and finishes. Workers on several machines need a file system whose record locks reach all of them.
"""

import time
from dataclasses import asdict
from pathlib import Path

from pipeline.commands import compose_config, run_command
from pipeline.context import StageContext
from pipeline.corpus.progress import CorpusProgress
from pipeline.corpus.stage import RowSource, generate_corpus
from pipeline.models import resolve_target
from pipeline.schema import Config
from pipeline.stages import STAGES, input_revisions, stage_fingerprint
from pipeline.store import Store
from pipeline.tracker import Tracker

_WAIT_S = 60.0


def join(config: Config, *, wait_s: float = _WAIT_S) -> None:
    """Work on the corpus stage's unfinished folder of this configuration.

    Raises:
        ValueError: nobody has started the stage within `wait_s`, or as `run_corpus`.
    """
    store, target = Store(Path(config.artifacts_dir)), resolve_target(config)
    values, revisions = asdict(config), input_revisions(config, target)
    stage = next(stage for stage in STAGES if stage.name == "corpus")
    fingerprint = stage_fingerprint(stage, values, revisions, {})
    work_dir = store.work_dir("corpus", fingerprint)
    deadline_s = time.monotonic() + wait_s
    while not work_dir.is_dir():
        if store.finished("corpus", fingerprint) is not None:
            print("the corpus is finished")
            return
        if time.monotonic() > deadline_s:
            raise ValueError(
                f"{work_dir}: no such folder after {wait_s:.0f} s. Start `python -m pipeline stages=[corpus]` with the same "
                "settings first; this command only helps it"
            )
        time.sleep(0.1)
    help_out(StageContext(config, work_dir, {}, Tracker(), target))


def help_out(context: StageContext) -> None:
    """Answer rows in the context's folder until none are left."""
    try:
        with CorpusProgress() as progress:
            generate_corpus(context, RowSource(context), progress)
    except (ValueError, OSError):
        if context.work_dir.is_dir():
            raise
        print("the corpus is finished")  # and its folder renamed while we looked


if __name__ == "__main__":
    run_command(lambda words: join(compose_config(words)))
