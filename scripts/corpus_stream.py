"""What the corpus stage itself takes, in memory and time: a long prompts file, and an engine that answers at once.

    python scripts/corpus_stream.py --rows 1000000 [--tokens-per-second 150]

First the whole file streams through the stage, with short answers. Memory counts as flat where, after the first quarter, it
grows by no more than 100 bytes a row (the tables of content hashes) and 16 MiB of the allocator's: a row itself takes
thousands. Then some rows get answers of the size that real ones have, with random candidates, which do not compress. What
such a row takes, and what one of the last quarter of the file took longer than one of the first, is held against what an
engine needs to write it: at `--tokens-per-second`, as corpus_speed.py measures it, or as measured here on the embedded
target. Ends with 1 where memory is not flat or the stage takes 5% of generation or more.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

from pipeline.context import StageContext
from pipeline.corpus.backends.base import FinishedRow, Options
from pipeline.corpus.backends.native import NativeCorpusBackend
from pipeline.corpus.progress import CorpusProgress
from pipeline.corpus.rows import Row
from pipeline.corpus.stage import RowSource, generate_corpus
from pipeline.corpus_schema import CorpusConfig
from pipeline.models import load_causal_lm, resolve_target
from pipeline.schema import Config, RandomModelConfig, TargetConfig
from pipeline.tracker import Tracker

NUM_SAMPLES = 20
MAX_BYTES_PER_ROW, SLACK_BYTES = 100, 16 * 2**20
MAX_OVERHEAD = 0.05
NUM_ANSWERS = 64  # different ones, so that a shard holds none twice


@dataclass
class Sample:
    """Memory of the process after so many rows."""

    num_rows: int
    seconds: float
    resident_bytes: int


class InstantEngine:
    """Answers every row with `num_tokens` tokens and their candidates, at once."""

    name = "instant"

    def __init__(self, num_rows: int, num_tokens: int) -> None:
        self.num_rows, self.num_tokens = num_rows, num_tokens
        self.samples: list[Sample] = []

    def generate(self, rows: Iterable[Row], options: Options) -> Iterator[FinishedRow]:
        """See `CorpusBackend.generate`."""
        random, shape = np.random.default_rng(0), (self.num_tokens, options.topk)
        ids = [random.integers(0, 300, shape, np.int32) for _ in range(NUM_ANSWERS)]
        logprobs = [np.sort(-random.exponential(5.0, shape), axis=1)[:, ::-1].astype(np.float16) for _ in ids]
        started_s, every = time.perf_counter(), max(1, self.num_rows // NUM_SAMPLES)
        for number, row in enumerate(rows):
            if number % every == 0:
                self._look(number, started_s)
            which = number % NUM_ANSWERS
            yield FinishedRow(row, list(range(3, 3 + self.num_tokens)), "length", ids[which], logprobs[which])
            options.report(self.num_tokens)
        self._look(self.num_rows, started_s)

    def _look(self, num_rows: int, started_s: float) -> None:
        memory = psutil.Process().memory_info().rss
        self.samples.append(Sample(num_rows, time.perf_counter() - started_s, memory))

    def close(self) -> None:
        """Nothing is held."""


def write_prompts(path: Path, num_rows: int) -> Path:
    """A JSONL file of different questions."""
    with path.open("w") as stream:
        for number in range(num_rows):
            stream.write(json.dumps({"prompt": f"What is {number} times {number % 97}?"}) + "\n")
    return path


def stream(num_rows: int, folder: Path, *, num_tokens: int = 4, topk: int = 8, shard_rows: int = 64) -> list[Sample]:
    """Run the stage's whole path but for the model; returns memory and time on the way, the last at the end.

    Raises:
        ValueError: the folder cannot be written.
    """
    work = folder / "work"
    work.mkdir(parents=True)
    prompts = write_prompts(folder / "prompts.jsonl", num_rows)
    corpus = CorpusConfig(prompts=str(prompts), num_prompts=None, topk=topk, shard_rows=shard_rows, max_new_tokens=16)
    target = TargetConfig(name="tiny", random=RandomModelConfig(), dtype="float32")
    config = Config(artifacts_dir=str(folder), target=target, corpus=corpus)
    context = StageContext(config, work, {}, Tracker(), resolve_target(config))
    engine, source = InstantEngine(num_rows, num_tokens), RowSource(context)
    with CorpusProgress() as progress:
        answers, _ = generate_corpus(context, source, progress, backend=engine)
    source.accounting.count_shards(answers.files())
    assert source.accounting.to_dict()["written"] == num_rows
    return engine.samples


@dataclass
class Memory:
    """Growth of memory after the first quarter of the rows."""

    num_bytes: int
    num_rows: int

    @classmethod
    def of(cls, samples: list[Sample]) -> "Memory":
        first, last = samples[len(samples) // 4], samples[-1]
        return cls(last.resident_bytes - first.resident_bytes, last.num_rows - first.num_rows)

    @property
    def is_flat(self) -> bool:
        """The rule of this file's head."""
        return self.num_bytes <= MAX_BYTES_PER_ROW * self.num_rows + SLACK_BYTES


def row_seconds(samples: list[Sample]) -> tuple[float, float, float]:
    """Seconds of a row on the whole, of one of the first quarter, and of one of the last."""
    ends = [samples[0], samples[len(samples) // 4], samples[-1 - len(samples) // 4], samples[-1]]
    mean, first, last = (
        (b.seconds - a.seconds) / (b.num_rows - a.num_rows)
        for a, b in ((ends[0], ends[3]), (ends[0], ends[1]), (ends[2], ends[3]))
    )
    return mean, first, last


def generation_speed(artifacts_dir: str, num_rows: int, num_tokens: int) -> float:
    """Tokens per second of `native` on the embedded target, without candidates; the first round is left out."""
    config = Config(artifacts_dir=artifacts_dir)
    model = load_causal_lm(resolve_target(config).path, config.target.dtype)
    engine = NativeCorpusBackend(model, batch_size=min(num_rows, config.corpus.batch_size), max_length=256)
    rows = [Row(str(i), "", "", tuple(range(100 + i, 140 + i)), 1.0, 1.0, i, 0, num_tokens, "") for i in range(num_rows)]
    for _ in range(2):
        started_s = time.perf_counter()
        num_new = sum(len(one.token_ids) for one in engine.generate(iter(rows), Options(frozenset())))
        speed = num_new / (time.perf_counter() - started_s)
    return speed


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path, help="where to work; default: a temporary folder")
    parser.add_argument("--real-rows", type=int, default=2000, help="rows with answers of real size")
    parser.add_argument("--response-tokens", type=int, default=104, help="that size")
    parser.add_argument("--topk", type=int, default=64)
    parser.add_argument("--tokens-per-second", type=float, help="of generation; default: measured here")
    parser.add_argument("--artifacts-dir", default="artifacts", help="where the embedded target lies")
    return parser.parse_args()


def main() -> int:
    """Measure and judge; returns the exit status."""
    arguments = parse()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        samples = stream(arguments.rows, folder / "long")
        real, _, _ = row_seconds(
            stream(arguments.real_rows, folder / "real", num_tokens=arguments.response_tokens, topk=arguments.topk)
        )
    for sample in samples:
        print(f"{sample.num_rows:>9} rows {sample.seconds:8.1f} s {sample.resident_bytes / 2**20:8.1f} MiB")
    memory = Memory.of(samples)
    print(f"memory: {memory.num_bytes / 2**20:.1f} MiB more after {memory.num_rows} more rows, "
          f"{memory.num_bytes / memory.num_rows:.0f} bytes a row: {'flat' if memory.is_flat else 'NOT FLAT'}")  # fmt: skip
    _, first, last = row_seconds(samples)
    stage = real + max(0.0, last - first)
    print(f"short rows: {first * 1e6:.0f} us each in the first quarter, {last * 1e6:.0f} us in the last")
    print(f"rows of {arguments.response_tokens} tokens, topk={arguments.topk}: {real * 1e6:.0f} us each")
    speed = arguments.tokens_per_second or generation_speed(arguments.artifacts_dir, 32, 32)
    overhead = stage * speed / arguments.response_tokens
    print(f"generation at {speed:.0f} tokens/s: {arguments.response_tokens / speed * 1e3:.1f} ms a row; the stage takes "
          f"{overhead:.2%} of that: {'under' if overhead < MAX_OVERHEAD else 'NOT UNDER'} {MAX_OVERHEAD:.0%}. It would take "
          f"{MAX_OVERHEAD:.0%} of an engine with {MAX_OVERHEAD * arguments.response_tokens / stage:.0f} tokens/s")  # fmt: skip
    return 0 if memory.is_flat and overhead < MAX_OVERHEAD else 1


if __name__ == "__main__":
    sys.exit(main())
