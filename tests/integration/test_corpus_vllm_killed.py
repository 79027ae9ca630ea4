"""The corpus stage on vLLM in process: the stage, or vLLM's engine process, killed with SIGKILL at ten random moments."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from pipeline.corpus import read_corpus
from pipeline.corpus.compare import compare
from tests.conftest import ROOT, processes_below
from tests.integration.vllm_models import save, tiny_llama

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(2400)]

NUM_KILLS, NUM_ROWS = 10, 240
START_S = 180
# All answers greedy; every second prompt is longer, so that rows finish out of order.
PROGRAM = """
import sys
from pathlib import Path
from pipeline.corpus.stage import run_corpus
from pipeline.commands import run_command
from pipeline.corpus_schema import CorpusConfig, ShareConfig
from pipeline.schema import Config, TargetConfig
from tests.unit.pipeline.corpus_samples import make_context

def main(words):
    target, prompts, work, backend = words
    corpus = CorpusConfig(prompts=prompts, num_prompts=None, backend=backend, shares=[ShareConfig(share=1.0, temperature=0.0)],
                          engine_args={"enforce_eager": True} if backend == "vllm" else {},
                          max_prompt_tokens=64, max_new_tokens=60, batch_size=4, shard_rows=2, topk=8)
    config = Config(artifacts_dir=str(Path(work).parent), target=TargetConfig(path=target, dtype="float32"), corpus=corpus)
    run_corpus(make_context(config, Path(work)))

run_command(main)
"""


class Stage:
    """The program in a process of its own, writing into `work`."""

    def __init__(self, folder: Path, work: Path, backend: str = "vllm") -> None:
        self.work, self.log = work, folder / f"{work.name}.log"
        words = [str(folder / "target"), str(folder / "prompts.jsonl"), str(work), backend]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, *words], cwd=ROOT, stdout=log, stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )  # fmt: skip

    def num_shards(self) -> int:
        return len(list((self.work / "shards").glob("*.parquet")))

    def wait_for(self, num_shards: int) -> None:
        deadline = time.monotonic() + START_S
        while self.num_shards() < num_shards:
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            assert time.monotonic() < deadline, "no new shard"
            time.sleep(0.005)

    def engines(self) -> list[psutil.Process]:
        return list(processes_below(self.process.pid, "EngineCor"))

    def finish(self) -> None:
        assert self.process.wait(600) == 0, self.log.read_text()[-3000:]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save(tmp_path / "target", tiny_llama(seed=0, num_layers=2))
    drawn = random.Random(1)
    prompts = [" ".join(f"w{drawn.randrange(3, 90)}" for _ in range(4 + 12 * (i % 2))) for i in range(NUM_ROWS)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(f'{{"prompt": "{prompt}"}}' for prompt in prompts))
    return tmp_path


def gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def kill_once(stage: Stage, victim: str, drawn: random.Random) -> None:
    """At some shard of the next few, and a moment later; then what must follow from it."""
    stage.wait_for(stage.num_shards() + 1 + drawn.randrange(4))
    time.sleep(drawn.uniform(0, 0.2))
    assert stage.process.poll() is None, "the stage ended before it could be killed"
    engines = stage.engines()
    assert engines, "vLLM has no process of its own here"
    if victim == "engine":
        for engine in engines:
            os.kill(engine.pid, signal.SIGKILL)
        assert stage.process.wait(60) == 2
        assert "run again to go on from there" in stage.log.read_text()
        return
    stage.process.kill()
    stage.process.wait()
    deadline = time.monotonic() + 30
    while not all(map(gone, engines)):
        assert time.monotonic() < deadline, "vLLM's engine stays without the stage"
        time.sleep(0.05)


def test_killed_at_ten_moments_stage_or_engine_leaves_the_same_corpus(folder: Path) -> None:
    """Each kill loses rows under way only; whatever was written stays, and nothing is written twice."""
    drawn = random.Random(0)
    undisturbed = folder / "undisturbed"
    Stage(folder, undisturbed).finish()
    kept: dict[Path, int] = {}
    for kill in range(NUM_KILLS):
        stage = Stage(folder, folder / "killed")
        kill_once(stage, ("stage", "engine")[kill % 2], drawn)
        assert all(file.stat().st_mtime_ns == made for file, made in kept.items()), "a shard was made again"
        kept = {file: file.stat().st_mtime_ns for file in (stage.work / "shards").glob("*.parquet")}
    Stage(folder, folder / "killed").finish()
    rows = read_corpus(folder / "killed")
    assert len(set(zip(rows["prompt_id"], rows["seed"], strict=True))) == len(rows) == NUM_ROWS
    result = compare(undisturbed, folder / "killed")
    assert result.agrees and result.num_greedy_equal == result.num_greedy == NUM_ROWS
