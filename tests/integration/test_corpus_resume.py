"""The corpus stage killed with SIGKILL at several moments, in every phase, and run again."""

import json
import multiprocessing
import signal
import time
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from pipeline.corpus import read_corpus
from tests.unit.pipeline.corpus_samples import run_stage


@pytest.fixture
def server() -> ForkServerContext:
    """Fresh processes that need not import torch one by one."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.unit.pipeline.corpus_samples"])
    return context


def start(server: ForkServerContext, artifacts: Path, work: Path) -> BaseProcess:
    process = server.Process(target=run_stage, args=(artifacts, work))
    process.start()
    return process


def finish(server: ForkServerContext, artifacts: Path, work: Path) -> None:
    process = start(server, artifacts, work)
    process.join(120)
    assert process.exitcode == 0


def kill_when(server: ForkServerContext, artifacts: Path, work: Path, folder: str, num_shards: int) -> None:
    """SIGKILL as soon as so many shards are there: in the middle of making the next one."""
    process = start(server, artifacts, work)
    deadline = time.monotonic() + 120
    while len(list((work / folder).glob("*.parquet"))) < num_shards and process.is_alive():
        assert time.monotonic() < deadline
        time.sleep(0.002)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL, "the stage ended before it could be killed"


@pytest.mark.slow
def test_killed_at_any_moment_and_resumed_gives_the_same_corpus(
    tmp_path: Path, server: ForkServerContext
) -> None:
    """speculators 716: resuming generates nothing twice and loses nothing."""
    undisturbed, work = tmp_path / "undisturbed", tmp_path / "work"
    finish(server, tmp_path, undisturbed)
    kept: dict[Path, int] = {}
    for folder, num_shards in (("questions", 1), ("questions", 4), ("shards", 1), ("shards", 4)):
        kill_when(server, tmp_path, work, folder, num_shards)
        assert all(file.stat().st_mtime_ns == made for file, made in kept.items()), (
            "a finished shard was made again"
        )
        kept = {file: file.stat().st_mtime_ns for file in work.rglob("*.parquet")}
    finish(server, tmp_path, work)
    assert read_corpus(work).to_list() == read_corpus(undisturbed).to_list()
    assert json.loads((work / "corpus.json").read_text()) == json.loads(
        (undisturbed / "corpus.json").read_text()
    )
    assert sorted(p.name for p in work.rglob("*")) == sorted(p.name for p in undisturbed.rglob("*"))
