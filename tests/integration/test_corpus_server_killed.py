"""The engine's process killed with SIGKILL at random moments while the stage waits for its answers, and started again."""

import json
import multiprocessing
import random
import socket
import threading
import time
from contextlib import suppress
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from pipeline.context import StageContext
from pipeline.corpus import read_corpus
from pipeline.corpus.backends.base import EngineFailure
from pipeline.corpus.stage import run_corpus
from tests.unit.pipeline.corpus_samples import make_context, tiny_config
from tests.unit.pipeline.fake_openai import serve

NUM_KILLS, NUM_ROWS = 10, 96


class KilledServer:
    """A server in a process of its own, which is killed and comes back."""

    def __init__(self, context: ForkServerContext) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.port: int = listener.getsockname()[1]
        self._context, self.num_killed = context, 0
        self._process = self._start()

    def _start(self) -> BaseProcess:
        process = self._context.Process(target=serve, args=(self.port,), daemon=True)
        process.start()
        deadline = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                return process
            except OSError:
                assert time.monotonic() < deadline and process.is_alive()
                time.sleep(0.01)

    def kill_often(self, work: Path, drawn: random.Random) -> None:
        """SIGKILL at ten moments: some shards later, and a little; it comes back after a pause."""
        for _ in range(NUM_KILLS):
            num_wanted = num_shards(work) + drawn.randrange(4)
            while num_shards(work) < num_wanted and not is_finished(work):
                time.sleep(0.002)
            time.sleep(drawn.uniform(0, 0.1))
            self.num_killed += not is_finished(work)
            self.stop()
            time.sleep(drawn.choice([0.0, 0.8]))
            self._process = self._start()

    def stop(self) -> None:
        self._process.kill()
        self._process.join()


def num_shards(work: Path) -> int:
    return len(list((work / "shards").glob("*.parquet")))


def is_finished(work: Path) -> bool:
    return (work / "corpus.json").exists()


def run_until_done(context: StageContext) -> int:
    """Run the stage again as long as it says that the server is gone; returns the number of runs."""
    for num_runs in range(1, 50):
        kept = set((context.work_dir / "shards").glob("*.parquet"))
        with suppress(EngineFailure):
            run_corpus(context)
            return num_runs
        assert all(file.exists() for file in kept), "a finished shard was lost"
    raise AssertionError("the stage does not come to its end")


@pytest.mark.slow
@pytest.mark.parametrize("max_retries", [1, 8])
def test_killed_at_ten_moments_the_engine_leaves_the_same_corpus(tmp_path: Path, max_retries: int) -> None:
    """With patience the stage waits for the server; without, it ends with what is written and is run again."""
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["tests.unit.pipeline.fake_openai"])
    server = KilledServer(processes)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": f"What is {i} and {i * i}?"}) for i in range(NUM_ROWS)))
    config = tiny_config(
        tmp_path, prompts=str(prompts), num_prompts=None, backend="openai", base_urls=[f"http://127.0.0.1:{server.port}"],
        num_in_flight=4, max_retries=max_retries, max_new_tokens=40, shard_rows=4,
    )  # fmt: skip
    undisturbed, killed = (make_context(config, tmp_path / name) for name in ("undisturbed", "killed"))
    run_corpus(undisturbed)
    killer = threading.Thread(target=server.kill_often, args=(killed.work_dir, random.Random(max_retries)), daemon=True)
    killer.start()
    num_runs = run_until_done(killed)
    killer.join(60)
    server.stop()
    assert server.num_killed == NUM_KILLS, "the stage ended before the server could be killed"
    assert (num_runs > 1) is (max_retries == 1)
    rows = read_corpus(killed.work_dir)
    assert rows.to_list() == read_corpus(undisturbed.work_dir).to_list()
    assert len(set(zip(rows["prompt_id"], rows["seed"], strict=True))) == len(rows) == NUM_ROWS
    assert (killed.work_dir / "corpus.json").read_text() == (undisturbed.work_dir / "corpus.json").read_text()
