"""Eight jobs of one sweep at the same time on one artifacts folder, as a launcher of parallel jobs starts them."""

import multiprocessing
import os
import signal
import time
from contextlib import redirect_stderr, redirect_stdout
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from pipeline.runner import run_stages
from pipeline.schema import Config
from pipeline.stages import STAGES, load_function
from tests.conftest import Composer

#: Four drafts, each asked for twice, of one corpus.
LOSSES = ("forward_kl", "reverse_kl", "tv", "jsd") * 2
SMALL = (
    "+experiment=tiny", "stages=[corpus,distill]", "tracking=off", "train.max_steps=2", "train.eval_every_steps=2",
    "train.checkpoint_every_steps=2",
)  # fmt: skip


@pytest.fixture
def jobs(make_config: Composer, tmp_path: Path) -> list[BaseProcess]:
    """Forks, so that eight processes do not each import everything; what they print is in `job-I.txt`."""
    for stage in STAGES:
        load_function(stage.function)
    artifacts = f"artifacts_dir={tmp_path / 'artifacts'}"
    configs = [make_config(*SMALL, f"loss={loss}", artifacts) for loss in LOSSES]
    context = multiprocessing.get_context("fork")
    return [
        context.Process(target=_job, args=(config, tmp_path / f"job-{number}.txt")) for number, config in enumerate(configs)
    ]


def _job(config: Config, output: Path) -> None:
    with output.open("w", buffering=1) as stream, redirect_stdout(stream), redirect_stderr(stream):
        run_stages(config)


def printed(folder: Path) -> list[str]:
    """The words of each line that a job printed about a stage."""
    return [" ".join(line.split()) for file in sorted(folder.glob("job-*.txt")) for line in file.read_text().splitlines()]


def num_lines(folder: Path, start: str) -> int:
    return sum(line.startswith(start) for line in printed(folder))


def assert_all_built(folder: Path) -> None:
    for stage, num_built in (("corpus", 1), ("distill", 4)):
        made = list((folder / "artifacts" / stage).iterdir())
        assert len(made) == num_built, made  # no lock, nothing incomplete, nothing set aside
        assert all((path / "stage.json").is_file() for path in made)


def test_each_stage_is_built_once(jobs: list[BaseProcess], tmp_path: Path) -> None:
    for job in jobs:
        job.start()
    for job in jobs:
        job.join(100)
    assert [job.exitcode for job in jobs] == [0] * len(LOSSES), printed(tmp_path)
    assert_all_built(tmp_path)
    assert num_lines(tmp_path, "corpus starts") == 1
    assert num_lines(tmp_path, "corpus reused") == 7
    assert num_lines(tmp_path, "distill starts") == 4
    assert num_lines(tmp_path, "distill reused") == 4


def test_a_killed_job_leaves_its_work_to_the_next(jobs: list[BaseProcess], tmp_path: Path) -> None:
    """The job that makes the corpus is killed with the lock in its hands and seven waiting: one goes on from its shards."""
    for job in jobs:
        job.start()
    corpus = tmp_path / "artifacts" / "corpus"
    deadline = time.monotonic() + 100
    while not list(corpus.glob("*.incomplete/shards/*.parquet")):
        assert time.monotonic() < deadline
        time.sleep(0.002)
    [lock] = corpus.glob("*.lock")
    holder = int(lock.read_text())
    os.kill(holder, signal.SIGKILL)
    for job in jobs:
        job.join(100)
    assert {job.exitcode for job in jobs if job.pid == holder} == {-signal.SIGKILL}
    assert {job.exitcode for job in jobs if job.pid != holder} == {0}, printed(tmp_path)
    assert_all_built(tmp_path)
    assert num_lines(tmp_path, "corpus starts") == num_lines(tmp_path, "corpus resumes") == 1
    assert num_lines(tmp_path, "corpus reused") == 6
