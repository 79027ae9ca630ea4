"""`python -m pipeline.corpus_report +experiment=name key=value ...`: the report of the corpus that these words describe.

It may be finished or still under way.
"""

from collections.abc import Sequence
from pathlib import Path

from pipeline.commands import compose_config, run_command
from pipeline.corpus.read import SHARDS
from pipeline.corpus.report import write_corpus_report
from pipeline.models import ModelRef, load_tokenizer, resolve_target
from pipeline.schema import Config
from pipeline.stages import input_revisions, stage_fingerprints
from pipeline.store import Store
from pipeline.tracking import open_tracker

NAME = "corpus-report"


def main(words: Sequence[str]) -> None:
    """Make the report, log it, and say where it lies.

    Raises:
        ValueError: a mistake in the words, or no such corpus.
    """
    config = compose_config(words)
    target = resolve_target(config)
    folder = corpus_folder(config, target)
    tokenizer = load_tokenizer(target.path, target.trust_remote_code)
    with open_tracker(config) as tracker, tracker.stage(NAME, folder.name):
        print(f"corpus report: {write_corpus_report(folder, tokenizer, tracker)}")


def corpus_folder(config: Config, target: ModelRef) -> Path:
    """The folder of this configuration's corpus, finished or under way.

    Raises:
        ValueError: there is none.
    """
    fingerprint = stage_fingerprints(config, input_revisions(config, target))["corpus"]
    store = Store(Path(config.artifacts_dir))
    for folder in (store.folder("corpus", fingerprint), store.work_dir("corpus", fingerprint)):
        if any((folder / SHARDS).glob("*.parquet")):
            return folder
    raise ValueError(
        f"artifacts_dir={config.artifacts_dir}: no corpus of this configuration yet; the same words with stages=[corpus] make it"
    )


if __name__ == "__main__":
    run_command(lambda words: main(words))
