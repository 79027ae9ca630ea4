"""Engines as actors of a local Ray: the contract, the corpus of one process, and actors that are killed."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipeline.corpus import read_corpus
from pipeline.corpus.backends import open_backend
from pipeline.corpus.backends.base import EngineFailure, FinishedRow, Options
from pipeline.corpus.backends.native import NativeCorpusBackend
from pipeline.corpus.backends.ray import RayCorpusBackend
from pipeline.corpus.backends.ray_actor import (
    EngineActor,
    EngineSpec,
    engine_spec,
    finished_rows,
    prompt_rows,
    prompt_table,
)
from pipeline.corpus.rows import Row
from pipeline.corpus.stage import run_corpus
from pipeline.corpus.target_info import load_target_info
from pipeline.corpus_schema import CorpusConfig
from pipeline.schema import Config
from tests.conftest import ROOT, processes_below
from tests.unit.pipeline.corpus_contract import STOPS, check_contract, make_rows
from tests.unit.pipeline.corpus_samples import make_context, tiny_config

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="needs the extra `ray`: pip install -e '.[ray]'"
)
NUM_ROWS = 64


@pytest.fixture(scope="module")
def local_ray() -> Iterator[Any]:
    """Ray with two CPUs, for all tests of this file."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray

    ray.init(
        address="local",
        num_cpus=2,
        object_store_memory=2**27,
        include_dashboard=False,
        log_to_driver=False,
    )
    yield ray
    ray.shutdown()


def ray_config(tmp_path: Path, **corpus: object) -> Config:
    return tiny_config(tmp_path, **{"backend": "ray", "ray_engine": "native", "ray_num_actors": 2, "batch_size": 2, **corpus})


def opened(config: Config, folder: Path) -> RayCorpusBackend:
    context = make_context(config, folder)
    backend = open_backend(context, load_target_info(context.target.path, False))
    assert isinstance(backend, RayCorpusBackend)
    return backend


def tiny_spec(tmp_path: Path, **corpus: object) -> EngineSpec:
    return engine_spec(ray_config(tmp_path, **corpus), make_context(ray_config(tmp_path), tmp_path / "work").target)


def test_rows_and_answers_pass_through_tables_unchanged(tmp_path: Path) -> None:
    """What an actor gives is what the engine gives: ids, candidates, and the row that could not be answered."""
    rows = [*make_rows(temperature=0.7, top_p=0.9, seed=2**62), *make_rows([[1] * 500, [], [1, 90]])]
    assert prompt_rows(prompt_table(rows)) == rows
    for topk in (0, 5):
        options = Options(STOPS, topk=topk)
        actor = EngineActor(tiny_spec(tmp_path, batch_size=8))
        answers = {one.row: one for one in finished_rows(actor.answer(prompt_table(rows), options), topk)}
        expected = {one.row: one for one in actor.start().generate(iter(rows), options)}
        assert answers.keys() == expected.keys() == set(rows)
        for row, one in expected.items():
            other = answers[row]
            assert (other.token_ids, other.finish_reason, other.failure) == (one.token_ids, one.finish_reason, one.failure)
            for name, dtype in (("topk_ids", "int32"), ("topk_logprobs", "float16")):
                mine, its = getattr(one, name), getattr(other, name)
                assert (mine is None) == (its is None)
                if mine is not None:
                    assert its.dtype == dtype and its.tolist() == mine.tolist()
        assert [one.failure for one in expected.values()].count(None) == 6


def test_an_engine_that_fails_is_started_once_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process may have been killed, while the actor's was not."""
    rows, options, num_calls = make_rows(), Options(STOPS), [0]
    actor = EngineActor(tiny_spec(tmp_path))
    expected = actor.answer(prompt_table(rows), options)
    generate = NativeCorpusBackend.generate

    def failing(self: NativeCorpusBackend, some: Iterator[Any], options: Options) -> Iterator[FinishedRow]:
        num_calls[0] += 1
        yield next(generate(self, some, options))
        raise EngineFailure("gone")

    monkeypatch.setattr(NativeCorpusBackend, "generate", failing)
    with pytest.raises(EngineFailure, match="gone"):
        actor.answer(prompt_table(rows), options)
    assert num_calls == [2]
    monkeypatch.setattr(NativeCorpusBackend, "generate", generate)
    first = actor.start()
    monkeypatch.setattr(first, "generate", lambda some, options: failing(first, some, options))  # type: ignore[arg-type]
    assert actor.answer(prompt_table(rows), options).equals(expected) and actor.backend is not first


def test_ray_that_is_not_there_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"corpus\.backend=ray: .*pip install -e '.\[ray\]'"):
        opened(ray_config(tmp_path), tmp_path / "work")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"backend": "ray", "ray_engine": "sglang"}, r"ray_engine='sglang': choose from"),
        ({"ray_engine": "native"}, "only corpus.backend=ray takes them"),
        ({"ray_address": "auto"}, "only corpus.backend=ray takes them"),
        ({"backend": "ray", "ray_num_actors": 0}, "ray_num_actors=0 .*at least 1"),
        ({"backend": "ray", "ray_cpus_per_actor": 0}, "ray_cpus_per_actor=0 must be at least 1"),
        ({"backend": "ray", "ray_gpus_per_actor": -1.0}, "ray_gpus_per_actor=-1.0"),
        ({"backend": "ray", "ray_engine": "native", "engine_args": {"a": 1}}, "engine_args"),
        ({"backend": "ray", "base_urls": ["http://x"]}, "base_urls"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CorpusConfig(**settings)


@needs_ray
def test_contract(local_ray: Any, tmp_path: Path) -> None:
    backend = opened(ray_config(tmp_path), tmp_path / "work")
    check_contract(backend)
    backend.close()
    assert local_ray.is_initialized(), "only a Ray of its own is ended"


class Killer:
    """Kills an actor's process by SIGKILL whenever twelve more rows have come in, `num_kills` times; more only come in when it is dead."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, num_kills: int) -> None:
        self.num_kills, self.killed, self.num_rows = num_kills, list[int](), 0
        generate = RayCorpusBackend.generate

        def watched(backend: RayCorpusBackend, rows: Iterable[Row], options: Options) -> Iterator[FinishedRow]:
            for finished in generate(backend, rows, options):
                yield finished
                self.num_rows += 1
                if len(self.killed) < self.num_kills and self.num_rows == 12 * (len(self.killed) + 1):
                    self.kill()

        monkeypatch.setattr(RayCorpusBackend, "generate", watched)

    def kill(self) -> None:
        actor = next(child for child in processes_below(os.getpid(), "EngineActor") if child.pid not in self.killed)
        actor.send_signal(signal.SIGKILL)
        actor.wait(30)
        self.killed.append(actor.pid)


def equal_corpora(first: Path, second: Path) -> bool:
    """Row by row, with the same accounting; only the engines' names may differ."""
    records = [json.loads((work / "corpus.json").read_text()) for work in (first, second)]
    assert [record.pop("backend") for record in records] == ["native", "ray:native"]
    return bool(records[0] == records[1]) and read_corpus(first).to_list() == read_corpus(second).to_list()


@needs_ray
@pytest.mark.slow
def test_killed_actors_lose_nothing(local_ray: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The corpus is that of one process that nobody disturbed: questions, and sampled rows included (float32)."""
    settings: dict[str, Any] = {"num_prompts": NUM_ROWS, "shard_rows": 4, "batch_size": 2}
    alone = make_context(tiny_config(tmp_path, **settings), tmp_path / "alone")
    run_corpus(alone)
    killed = make_context(ray_config(tmp_path, **settings), tmp_path / "killed")
    killer = Killer(monkeypatch, num_kills=2)
    figures = run_corpus(killed)
    assert len(set(killer.killed)) == 2
    assert figures["num_written"] == NUM_ROWS and figures["num_failed"] == 0
    assert equal_corpora(alone.work_dir, killed.work_dir)


@needs_ray
@pytest.mark.slow
def test_where_no_restart_is_allowed_the_next_run_goes_on(
    local_ray: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, num_rows = tmp_path / "prompts.jsonl", 2 * NUM_ROWS
    prompts.write_text("\n".join(json.dumps({"prompt": f"What is {i} and {i * i}?"}) for i in range(num_rows)))
    settings: dict[str, Any] = {"prompts": str(prompts), "num_prompts": None, "shard_rows": 4, "batch_size": 2}
    alone = make_context(tiny_config(tmp_path, **settings), tmp_path / "alone")
    run_corpus(alone)
    killed = make_context(ray_config(tmp_path, max_retries=0, ray_num_actors=1, **settings), tmp_path / "killed")
    Killer(monkeypatch, num_kills=1)
    with pytest.raises(EngineFailure, match=r"corpus\.backend=ray: .*died.* Finished rows are kept"):
        run_corpus(killed)
    kept = {file: file.stat().st_mtime_ns for file in (killed.work_dir / "shards").glob("*.parquet")}
    assert 3 <= len(kept) < num_rows // 4
    run_corpus(killed)
    assert equal_corpora(alone.work_dir, killed.work_dir)
    assert all(file.stat().st_mtime_ns == time_ns for file, time_ns in kept.items())


@needs_ray
def test_what_cannot_start_is_said(local_ray: Any, tmp_path: Path) -> None:
    config = ray_config(tmp_path)
    for field, settings in (("CPU", {"ray_num_actors": 99}), ("GPU", {"ray_gpus_per_actor": 1.0})):
        with pytest.raises(ValueError, match=rf"ray_num_actors and corpus.ray_{field.lower()}s_per_actor ask for .* Ray has"):
            opened(replace(config, corpus=replace(config.corpus, **settings)), tmp_path / "work")
    spec = tiny_spec(tmp_path)
    broken = replace(spec, config=replace(spec.config, target=replace(spec.config.target, dtype="float12")))
    with pytest.raises(ValueError, match=r"no engine starts: .*float12") as caught:
        RayCorpusBackend(broken, address=None, num_actors=1, cpus_per_actor=1, gpus_per_actor=None, max_retries=1)
    assert "Traceback" not in str(caught.value)


PROGRAM = """
import sys
from pathlib import Path
from tests.unit.pipeline.test_corpus_ray import opened, ray_config
folder = Path(sys.argv[1])
for word in ("first", "second"):
    backend = opened(ray_config(folder, ray_num_actors=1), folder / "work")
    print(word, flush=True)
    sys.stdin.readline()
    backend.close()
    print("closed", flush=True)
"""


@needs_ray
@pytest.mark.slow
def test_a_ray_of_its_own_goes_with_it(tmp_path: Path) -> None:
    """When it is closed, and when SIGKILL leaves the stage no time for that."""
    stage = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert stage.stdout is not None and stage.stdin is not None
    for word in ("first", "second"):
        assert stage.stdout.readline() == f"{word}\n"
        started = psutil.Process(stage.pid).children(recursive=True)
        assert any("raylet" in child.name() for child in started)
        if word == "first":
            stage.stdin.write("\n")
            stage.stdin.flush()
            assert stage.stdout.readline() == "closed\n"
        else:
            stage.kill()
        assert psutil.wait_procs(started, timeout=30)[1] == []
    stage.communicate()
