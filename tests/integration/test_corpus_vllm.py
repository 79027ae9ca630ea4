"""The corpus from vLLM itself, in process and by `vllm serve` on loopback: the contract, and what kills an engine."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from pipeline.corpus.backends import open_backend
from pipeline.corpus.backends.base import EngineFailure, FinishedRow, Options, generate_in_order
from pipeline.corpus.backends.http import RetryPolicy, Servers
from pipeline.corpus.backends.openai import OpenAICorpusBackend
from pipeline.corpus.backends.vllm import VllmCorpusBackend
from pipeline.corpus.target_info import load_target_info
from pipeline.corpus_schema import CorpusConfig
from pipeline.schema import Config, TargetConfig
from tests.conftest import processes_below
from tests.integration.vllm_models import NUM_TOKENS, save, tiny_llama
from tests.unit.pipeline.corpus_contract import STOPS, check_contract, make_rows
from tests.unit.pipeline.corpus_samples import make_context

pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(400)]

MODEL = {"seed": 0, "num_layers": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("target"), tiny_llama(**MODEL))


def engine_of(folder: Path, **engine_args: object) -> VllmCorpusBackend:
    return VllmCorpusBackend(
        str(folder),
        dtype="float32",
        batch_size=16,
        max_length=128,
        vocab_size=NUM_TOKENS,
        topk=16,
        trust_remote_code=False,
        engine_args={"enforce_eager": True, **engine_args},
    )


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[VllmCorpusBackend]:
    engine = engine_of(folder)
    yield engine
    engine.close()


def engine_processes() -> set[psutil.Process]:
    """vLLM's, below this process, also below an actor."""
    return processes_below(os.getpid(), "EngineCor")


def test_contract_in_process(engine: VllmCorpusBackend) -> None:
    check_contract(engine, tiny_llama(**MODEL), atol=5e-3)


def test_contract_in_an_actor_of_ray(folder: Path, tmp_path: Path) -> None:
    """And an engine that is killed while its actor lives is started again."""
    pytest.importorskip("ray")
    corpus = CorpusConfig(
        backend="ray", batch_size=4, max_prompt_tokens=64, max_new_tokens=64, topk=16, engine_args={"enforce_eager": True}
    )
    config = Config(artifacts_dir=str(tmp_path), target=TargetConfig(path=str(folder), dtype="float32"), corpus=corpus)
    others = engine_processes()
    backend = open_backend(make_context(config, tmp_path / "work"), load_target_info(str(folder), False))
    try:
        assert backend.name == "ray:vllm"
        check_contract(backend, tiny_llama(**MODEL), atol=5e-3)
        (engine,) = engine_processes() - others
        expected = generate_in_order(backend, make_rows(), Options(STOPS, topk=4))
        engine.send_signal(signal.SIGKILL)
        again = generate_in_order(backend, make_rows(), Options(STOPS, topk=4))
        assert [one.token_ids for one in again] == [one.token_ids for one in expected]
    finally:
        backend.close()


def test_contract_by_server(folder: Path, tmp_path: Path) -> None:
    from pipeline.vllm_server import VLLMServer

    words = ["--dtype", "float32", "--enforce-eager", "--max-logprobs", "16"]
    with VLLMServer(folder, log=tmp_path / "server.log", arguments=words) as server:
        client = Servers([server.base_url], RetryPolicy(4, 60.0), num_connections=16)
        engine = OpenAICorpusBackend(client, served_model=None, num_in_flight=16, extra={})
        check_contract(engine, tiny_llama(**MODEL), atol=5e-3)
        with pytest.raises(EngineFailure, match=r"refused.*HTTP 400.*max allowed: 16"):
            list(engine.generate(iter(make_rows()), Options(STOPS, topk=17)))


def test_processed_logprobs_are_refused(folder: Path) -> None:
    engine = engine_of(folder, logprobs_mode="processed_logprobs")
    try:
        with pytest.raises(EngineFailure, match="raw_logprobs"):
            list(engine.generate(iter(make_rows()), Options(STOPS, topk=4)))
    finally:
        engine.close()


def test_a_killed_engine_process_ends_the_run_and_keeps_what_had_finished(folder: Path) -> None:
    others = engine_processes()
    engine = engine_of(folder)
    rows = make_rows([[1, 10 + i % 80] for i in range(400)], max_new_tokens=60)
    finished: list[FinishedRow] = []
    with pytest.raises(EngineFailure, match=r"the engine failed .*run again"):
        for one in engine.generate(iter(rows), Options(STOPS, topk=4)):
            finished.append(one)
            if len(finished) == 40:
                for process in engine_processes() - others:
                    process.send_signal(signal.SIGKILL)
    assert 40 <= len(finished) < 400 and all(one.failure is None for one in finished)
