"""The corpus stage killed with SIGKILL at random moments in every phase and run again, and several workers on one corpus."""

import json
import multiprocessing
import random
import signal
import time
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from pipeline.corpus import read_corpus
from tests.unit.pipeline.corpus_samples import NUM_KILLED_ROWS as NUM_ROWS
from tests.unit.pipeline.corpus_samples import run_helper, run_stage

NUM_KILLS = 10
Program = Callable[[Path, Path], None]


@pytest.fixture
def server() -> ForkServerContext:
    """Fresh processes that need not import torch one by one."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.unit.pipeline.corpus_samples"])
    return context


def start(
    server: ForkServerContext, artifacts: Path, work: Path, program: Program = run_stage
) -> BaseProcess:
    process = server.Process(target=program, args=(artifacts, work))
    process.start()
    return process


def finish(process: BaseProcess) -> None:
    process.join(120)
    assert process.exitcode == 0


def num_files(work: Path) -> int:
    return len(list(work.rglob("*.parquet")))


def kill_at(process: BaseProcess, work: Path, *, num_wanted: int, delay_s: float) -> None:
    """SIGKILL when so many files are there, and a little later."""
    deadline = time.monotonic() + 120
    while num_files(work) < num_wanted and process.is_alive():
        assert time.monotonic() < deadline
        time.sleep(0.002)
    time.sleep(delay_s)
    process.kill()
    process.join()


def same(work: Path, undisturbed: Path) -> None:
    """Equal rows, accounting and number of files; nothing half written is left."""
    assert read_corpus(work).to_list() == read_corpus(undisturbed).to_list()
    assert json.loads((work / "corpus.json").read_text()) == json.loads(
        (undisturbed / "corpus.json").read_text()
    )
    assert {p.name for p in work.iterdir()} == {p.name for p in undisturbed.iterdir()}
    assert not list(work.rglob("*.tmp"))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_killed_at_ten_moments_and_resumed_gives_the_same_corpus(
    tmp_path: Path, server: ForkServerContext, seed: int
) -> None:
    """speculators 716: resuming generates nothing twice and loses nothing."""
    drawn = random.Random(seed)
    undisturbed, work = tmp_path / "undisturbed", tmp_path / "work"
    finish(start(server, tmp_path, undisturbed))
    num_killed = 0
    kept: dict[Path, int] = {}
    for kill in range(NUM_KILLS):
        process = start(server, tmp_path, work)
        # The first one dies somewhere in its start, the others some files later, in the questions or in the answers.
        num_wanted = num_files(work) + drawn.randrange(5) if kill else 0
        kill_at(process, work, num_wanted=num_wanted, delay_s=drawn.uniform(0, 0.1))
        num_killed += process.exitcode == -signal.SIGKILL
        assert all(file.stat().st_mtime_ns == made for file, made in kept.items()), "a shard was made again"
        kept = {file: file.stat().st_mtime_ns for file in work.rglob("*.parquet")}
    assert num_killed == NUM_KILLS, "the stage ended before it could be killed"
    finish(start(server, tmp_path, work))
    same(work, undisturbed)
    ids = [(row["prompt_id"], row["seed"]) for row in read_corpus(work).select_columns(["prompt_id", "seed"])]
    assert len(ids) == len(set(ids)) == NUM_ROWS


@pytest.mark.slow
def test_two_workers_write_each_row_once(tmp_path: Path, server: ForkServerContext) -> None:
    """And one of three dies with rows in its hands, which the others then make."""
    undisturbed, work = tmp_path / "undisturbed", tmp_path / "work"
    finish(start(server, tmp_path, undisturbed))
    stage = start(server, tmp_path, work)
    helper, dying = (start(server, tmp_path, work, run_helper) for _ in range(2))
    kill_at(dying, work / "shards", num_wanted=2, delay_s=0.01)
    finish(stage)
    finish(helper)
    ids = [(row["prompt_id"], row["seed"]) for row in read_corpus(work).select_columns(["prompt_id", "seed"])]
    assert len(ids) == len(set(ids))
    same(work, undisturbed)
