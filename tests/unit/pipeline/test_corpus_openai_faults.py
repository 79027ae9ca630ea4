"""The corpus from servers that drop connections, answer 500 or 429 or broken JSON, come back, or stop for good."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from pipeline.corpus import read_corpus
from pipeline.corpus.backends.base import EngineFailure, FinishedRow, Options, generate_in_order
from pipeline.corpus.backends.http import RetryPolicy, Servers
from pipeline.corpus.backends.openai import OpenAICorpusBackend
from pipeline.corpus.stage import run_corpus
from tests.unit.pipeline.corpus_contract import PROMPTS, STOPS, make_rows, plain_greedy, tokens
from tests.unit.pipeline.corpus_samples import make_context, tiny_config
from tests.unit.pipeline.corpus_sources import write_jsonl
from tests.unit.pipeline.fake_openai import FAULTS, FakeServer, engine_of, fake_server, faults

OPTIONS = Options(STOPS, topk=4)


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with fake_server() as fake:
        yield fake


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.corpus.backends.http._FIRST_PAUSE_S", 0.002)
    monkeypatch.setattr("pipeline.corpus.backends.http._MAX_PAUSE_S", 0.02)


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


@pytest.mark.parametrize("bad", [None, PROMPTS[2]])
def test_with_one_server_gone_every_row_reaches_the_other(server: FakeServer, bad: list[int] | None) -> None:
    """One retry is enough, since it goes to the next server; a row that the living one cannot answer fails alone."""

    def change(answer: dict[str, Any], body: dict[str, Any]) -> None:
        if body["prompt"] == bad:
            raise RuntimeError("the server's worker died")

    server.change = change
    with fake_server() as gone:
        engine = engine_of(gone, server, max_retries=1)
        gone.dies_after = 0
        rows = make_rows(PROMPTS + [[1, 50 + i] for i in range(60)], max_new_tokens=4)
        failed = [one for one in engine.generate(iter(rows), Options(STOPS)) if one.failure is not None]
    assert [list(one.row.prompt_token_ids) for one in failed] == ([] if bad is None else [bad])


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
