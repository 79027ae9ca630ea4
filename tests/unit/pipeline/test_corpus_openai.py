"""The corpus from a server: the contract, the faults that servers have, and answers that must not be believed."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from pipeline.corpus import read_corpus
from pipeline.corpus.backends.base import EngineFailure, FinishedRow, Options, generate_in_order
from pipeline.corpus.backends.http import RetryPolicy, Servers
from pipeline.corpus.backends.openai import OpenAICorpusBackend
from pipeline.corpus.stage import run_corpus
from tests.unit.pipeline.corpus_contract import (
    PROMPTS,
    STOPS,
    check_contract,
    make_rows,
    plain_greedy,
    tokens,
)
from tests.unit.pipeline.corpus_samples import make_context, tiny_config
from tests.unit.pipeline.corpus_sources import write_jsonl
from tests.unit.pipeline.fake_openai import FAULTS, FakeServer, fake_server, faults

OPTIONS = Options(STOPS, topk=4)


def engine_of(
    *servers: FakeServer, max_retries: int = 8, num_in_flight: int = 8, **settings: Any
) -> OpenAICorpusBackend:
    urls = [server if isinstance(server, str) else server.url for server in servers]
    client = Servers(urls, RetryPolicy(max_retries, 20.0), num_connections=num_in_flight, **settings)
    return OpenAICorpusBackend(client, served_model=None, num_in_flight=num_in_flight, extra={})


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with fake_server() as fake:
        yield fake


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.corpus.backends.http._FIRST_PAUSE_S", 0.002)
    monkeypatch.setattr("pipeline.corpus.backends.http._MAX_PAUSE_S", 0.02)


def test_contract(server: FakeServer) -> None:
    check_contract(engine_of(server))


def test_requests_say_everything_that_servers_would_guess(server: FakeServer) -> None:
    bodies: list[dict[str, Any]] = []
    server.change = lambda answer, body: bodies.append(body)
    list(engine_of(server, api_key="secret").generate(iter(make_rows(temperature=0.7)), OPTIONS))
    body = bodies[-1]
    assert {
        "return_token_ids": True,
        "repetition_penalty": 1.0,
        "top_k": -1,
        "min_p": 0.0,
    }.items() <= body.items()
    assert body["prompt"] in PROMPTS and body["temperature"] == 0.7 and body["stop_token_ids"] == [2]
    assert server.headers["Authorization"] == "Bearer secret"


def test_many_requests_are_in_flight_over_all_servers(server: FakeServer) -> None:
    barrier = threading.Barrier(6, timeout=20)

    def wait(answer: dict[str, Any], body: dict[str, Any]) -> None:
        barrier.wait()

    with fake_server() as other:
        engine = engine_of(server, other, num_in_flight=6)
        server.change = other.change = wait
        rows = make_rows([[1, 60 + i] for i in range(36)], max_new_tokens=2)
        assert len(list(engine.generate(iter(rows), Options(STOPS)))) == 36
        assert len(server.answered) == len(other.answered) == 18


@pytest.mark.parametrize("seed", range(3))
def test_faults_are_retried_and_leave_no_trace(server: FakeServer, seed: int) -> None:
    rows = make_rows([[1, 50 + i] for i in range(40)], max_new_tokens=8)
    undisturbed = generate_in_order(engine_of(server), rows, OPTIONS)
    server.num_requests, server.fault_of = 0, faults(seed, 0.4)
    disturbed = generate_in_order(engine_of(server, max_retries=20), rows, OPTIONS)
    assert (
        tokens(disturbed) == tokens(undisturbed) == [plain_greedy(list(r.prompt_token_ids), 8) for r in rows]
    )
    assert [one.topk_ids.tolist() for one in disturbed] == [one.topk_ids.tolist() for one in undisturbed]  # type: ignore[union-attr]
    assert server.num_requests > 50


def test_one_of_two_servers_stops_and_the_other_goes_on(server: FakeServer) -> None:
    with fake_server() as dying:
        engine = engine_of(dying, server)
        dying.dies_after = 3
        rows = make_rows([[1, 50 + i] for i in range(30)], max_new_tokens=4)
        assert all(one.failure is None for one in engine.generate(iter(rows), OPTIONS))
        assert 3 <= len(dying.answered) <= 3 + 8 < len(server.answered)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_server_that_fails_for_good_ends_the_run_after_all_that_came_in(server: FakeServer, fault: str) -> None:
    """Its last answers, and its state: refused connections, errors, too many requests, broken answers."""
    engine = engine_of(server, max_retries=3, num_in_flight=4)
    server.fault_of = lambda number: fault if number >= 14 else None  # the two probes included
    finished: list[FinishedRow] = []
    with pytest.raises(EngineFailure, match=r"no server answers any more \(4 attempts.*run again"):
        for one in engine.generate(
            iter(make_rows([[1, 50 + i] for i in range(60)], max_new_tokens=4)), OPTIONS
        ):
            finished.append(one)
    assert len(finished) == 12 and all(one.failure is None for one in finished)


def test_a_server_that_stops_ends_the_run_after_all_that_came_in(server: FakeServer) -> None:
    engine = engine_of(server, max_retries=3, num_in_flight=4)
    server.dies_after = 12  # the two probes included
    finished: list[FinishedRow] = []
    with pytest.raises(EngineFailure, match=r"no server answers any more"):
        for one in engine.generate(
            iter(make_rows([[1, 50 + i] for i in range(60)], max_new_tokens=4)), OPTIONS
        ):
            finished.append(one)
    assert len(finished) == len(server.answered) - 2 >= 10 and all(one.failure is None for one in finished)


def test_a_server_is_given_the_time_that_it_asks_for(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.corpus.backends.http._MAX_PAUSE_S", 1.0)
    server.fault_of = lambda number: "429" if number == 0 else None
    server.retry_after_s = 0.3
    started = time.monotonic()
    (one,) = engine_of(server).generate(iter(make_rows()[:1]), Options(STOPS))
    assert one.failure is None and time.monotonic() - started >= 0.3


def test_pauses_grow_and_end_with_the_retries(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("pipeline.corpus.backends.http._FIRST_PAUSE_S", 1.0)
    monkeypatch.setattr("pipeline.corpus.backends.http._MAX_PAUSE_S", 8.0)
    engine = engine_of(server, max_retries=5, num_in_flight=1)
    pauses: list[float] = []
    monkeypatch.setattr(engine.servers.stop, "wait", pauses.append)
    server.fault_of = lambda number: "500"
    with pytest.raises(EngineFailure, match="6 attempts failed; the last one: .*HTTP 500: try again"):
        list(engine.generate(iter(make_rows()[:1]), Options(STOPS)))
    assert all(longest / 2 <= pause <= longest for pause, longest in zip(pauses, [1, 2, 4, 8, 8], strict=True))
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.endswith("HTTP 500: try again; trying again")


@pytest.mark.parametrize("status", ["401", "403", "404"])
def test_what_no_retry_mends_is_said_at_once(server: FakeServer, status: str) -> None:
    engine = engine_of(server, num_in_flight=1)
    server.fault_of = lambda number: status
    with pytest.raises(EngineFailure, match=rf"HTTP {status}.*Check the address, .* OPENAI_API_KEY"):
        list(engine.generate(iter(make_rows()[:1]), Options(STOPS)))
    assert server.num_requests == 1


def test_the_stage_keeps_what_came_and_goes_on_from_there(server: FakeServer, tmp_path: Path) -> None:
    prompts = write_jsonl(tmp_path / "p.jsonl", [{"prompt": f"What is {i} and {i * i}?"} for i in range(40)])
    settings = {"prompts": str(prompts), "num_prompts": None, "backend": "openai", "base_urls": [server.url],
                "num_in_flight": 4, "max_retries": 2, "max_new_tokens": 8}  # fmt: skip
    undisturbed = make_context(tiny_config(tmp_path, **settings), tmp_path / "undisturbed")
    run_corpus(undisturbed)
    context = make_context(undisturbed.config, tmp_path / "work")
    server.answered.clear()
    server.num_answers, server.dies_after = 0, 17
    with pytest.raises(EngineFailure, match="no server answers any more .*Finished rows are kept"):
        run_corpus(context)
    shards = list((context.work_dir / "shards").iterdir())
    assert sum(pq.read_metadata(shard).num_rows for shard in shards) == len(server.answered) - 2 >= 15
    server.dies_after = None
    run_corpus(context)
    assert all(shard.exists() for shard in shards)
    assert len(server.answered) - 4 == 40, "a row was asked for twice"
    assert read_corpus(context.work_dir).to_list() == read_corpus(undisturbed.work_dir).to_list()


def test_a_silent_server_does_not_keep_the_program(server: FakeServer) -> None:
    release = threading.Event()
    server.change = lambda answer, body: release.wait(20) and None  # type: ignore[func-returns-value]
    client = Servers([server.url], RetryPolicy(1, 0.2), num_connections=2)
    engine = OpenAICorpusBackend(client, served_model=None, num_in_flight=2, extra={})
    started = time.monotonic()
    with pytest.raises(EngineFailure, match="ReadTimeoutError"):
        list(engine.generate(iter(make_rows()), Options(STOPS)))
    assert time.monotonic() - started < 10
    release.set()


def test_a_row_that_always_fails_does_not_stop_the_others(server: FakeServer) -> None:
    bad = PROMPTS[2]

    def change(answer: dict[str, Any], body: dict[str, Any]) -> None:
        if body["prompt"] == bad:
            raise RuntimeError("the server's worker died")

    server.change = change
    engine = engine_of(server, max_retries=6, num_in_flight=2)
    rows = make_rows(PROMPTS + [[1, 60 + i] for i in range(40)], max_new_tokens=8)
    failed = [one for one in engine.generate(iter(rows), Options(STOPS)) if one.failure is not None]
    assert [list(one.row.prompt_token_ids) for one in failed] == [bad]


def test_a_server_that_comes_back_after_all_attempts_costs_no_row(server: FakeServer) -> None:
    """Else the row would be taken for one that the server cannot answer."""
    engine = engine_of(server, max_retries=2, num_in_flight=1)
    server.fault_of = lambda number: "500" if number < 3 else None
    (one,) = engine.generate(iter(make_rows()[:1]), Options(STOPS))
    assert one.failure is None and server.num_requests == 5, "three attempts, one token, the row"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda choice: choice.pop("token_ids"), "returns no token ids"),
        (lambda choice: choice.update(prompt_token_ids=[1, *choice["prompt_token_ids"]]), "changed the prompt's token ids"),
        (lambda choice: choice.update(token_ids=[*choice["token_ids"], 2, 5]), "has stop tokens at"),
        (lambda choice: choice.update(finish_reason="stop"), "has stop tokens at"),
        (lambda choice: choice.update(logprobs=None), "has no 'logprobs'"),
        (lambda choice: choice["logprobs"]["top_logprobs"].pop(), "log-probabilities of"),
        (lambda choice: choice["logprobs"].update(top_logprobs=[{" the": -1.0}] * len(choice["token_ids"])), "corpus.rescore=true"),
        (lambda choice: [top.popitem() for top in choice["logprobs"]["top_logprobs"] for _ in range(2)], "gives only"),
    ],
)  # fmt: skip
def test_answers_that_must_not_be_believed(
    server: FakeServer, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    def change_choice(answer: dict[str, Any], body: dict[str, Any]) -> None:
        if body["max_tokens"] > 1:  # the probes pass
            change(answer["choices"][0])

    server.change = change_choice
    with pytest.raises(EngineFailure, match=message):
        list(engine_of(server).generate(iter(make_rows([[1, 50]], max_new_tokens=3)), OPTIONS))


def test_a_server_with_a_lower_limit_of_candidates_is_refused_before_any_work(server: FakeServer) -> None:
    server.max_logprobs = 20
    with pytest.raises(EngineFailure, match=r"a request for one token is refused: .*HTTP 400.*max allowed"):
        list(engine_of(server).generate(iter(make_rows()), Options(STOPS, topk=32)))
    assert not server.answered


def test_the_served_model_must_be_known_to_all_servers(server: FakeServer) -> None:
    client = Servers([server.url], RetryPolicy(0, 5.0), num_connections=1)
    with pytest.raises(EngineFailure, match=r"corpus.served_model=other: .* serves \['tiny'\]"):
        OpenAICorpusBackend(client, served_model="other", num_in_flight=1, extra={})
    with pytest.raises(EngineFailure, match=r"no server answers any more"):
        engine_of("http://127.0.0.1:9", max_retries=1)  # type: ignore[arg-type]
