"""What the corpus stage itself takes, in time and memory: a prompts file of any length and an engine that answers at once.

python scripts/corpus_stream.py --rows 1000000 [--folder DIR]
"""

import argparse
import json
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

from pipeline.context import StageContext
from pipeline.corpus.backends.base import FinishedRow, Options
from pipeline.corpus.progress import CorpusProgress
from pipeline.corpus.rows import Row
from pipeline.corpus.stage import RowSource, generate_corpus
from pipeline.models import resolve_target
from pipeline.schema import Config, CorpusConfig, RandomModelConfig, TargetConfig
from pipeline.tracker import Tracker

NUM_SAMPLES = 20


@dataclass
class Sample:
    """Memory of the process after so many rows."""

    num_rows: int
    seconds: float
    resident_bytes: int


class InstantEngine:
    """Answers every row with `num_tokens` tokens and `topk` candidates, at once."""

    name = "instant"

    def __init__(self, num_rows: int, num_tokens: int = 4) -> None:
        self.every, self.num_tokens = max(1, num_rows // NUM_SAMPLES), num_tokens
        self.samples: list[Sample] = []

    def generate(self, rows: Iterable[Row], options: Options) -> Iterator[FinishedRow]:
        """See `CorpusBackend.generate`."""
        started_s = time.perf_counter()
        ids = np.tile(np.arange(options.topk, dtype=np.int32), (self.num_tokens, 1))
        logprobs = np.zeros(ids.shape, np.float16)
        for number, row in enumerate(rows):
            if number % self.every == 0:
                memory = psutil.Process().memory_info().rss
                self.samples.append(Sample(number, time.perf_counter() - started_s, memory))
            yield FinishedRow(row, list(range(3, 3 + self.num_tokens)), "length", ids, logprobs)

    def close(self) -> None:
        """Nothing is held."""


def write_prompts(path: Path, num_rows: int) -> Path:
    """A JSONL file of different questions."""
    with path.open("w") as stream:
        for number in range(num_rows):
            stream.write(json.dumps({"prompt": f"What is {number} times {number % 97}?"}) + "\n")
    return path


def stream(num_rows: int, folder: Path, *, topk: int = 8, shard_rows: int = 4096) -> InstantEngine:
    """Run the stage's whole path but for the model; returns the engine with its samples of memory.

    Raises:
        ValueError: the folder cannot be written.
    """
    prompts = write_prompts(folder / "prompts.jsonl", num_rows)
    corpus = CorpusConfig(
        prompts=str(prompts), num_prompts=None, topk=topk, shard_rows=shard_rows, max_new_tokens=16
    )
    target = TargetConfig(name="tiny", random=RandomModelConfig(), dtype="float32")
    config = Config(artifacts_dir=str(folder), target=target, corpus=corpus)
    work = folder / "work"
    work.mkdir()
    context = StageContext(config, work, {}, Tracker(), resolve_target(config))
    engine = InstantEngine(num_rows)
    source = RowSource(context)
    with CorpusProgress() as progress:
        answers, _ = generate_corpus(context, source, progress, backend=engine)
    source.accounting.count_shards(answers.files())
    assert source.accounting.to_dict()["written"] == num_rows
    return engine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path, help="where to work; default: a temporary folder")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        samples = stream(arguments.rows, arguments.folder or Path(temporary)).samples
    for sample in samples:
        print(f"{sample.num_rows:>9} rows {sample.seconds:8.1f} s {sample.resident_bytes / 2**20:8.1f} MiB")
    growth = samples[-1].resident_bytes - samples[len(samples) // 4].resident_bytes
    num_rows = samples[-1].num_rows - samples[len(samples) // 4].num_rows
    print(
        f"{growth / num_rows:.0f} bytes and {samples[-1].seconds / samples[-1].num_rows * 1e6:.0f} us a row"
    )


if __name__ == "__main__":
    main()
