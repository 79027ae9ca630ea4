"""The corpus from a server: the contract, what is asked, and answers that must not be believed."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pipeline.corpus.backends.base import EngineFailure, Options
from pipeline.corpus.backends.http import RetryPolicy, Servers
from pipeline.corpus.backends.openai import OpenAICorpusBackend
from tests.unit.pipeline.corpus_contract import PROMPTS, STOPS, check_contract, make_rows
from tests.unit.pipeline.fake_openai import FakeServer, engine_of, fake_server

OPTIONS = Options(STOPS, topk=4)


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with fake_server() as fake:
        yield fake


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
    for answer in (b"[]", b'{"object": "list"}', b'{"data": ["tiny"]}', b'"moved"'):
        server.models = (200, answer)
        with pytest.raises(EngineFailure, match=r"/models is no list of models: .* ends in /v1"):
            engine_of(server)
    for status in (400, 413, 422):
        server.models = (status, b"no")
        with pytest.raises(EngineFailure, match=rf"/models: .*HTTP {status}"):
            engine_of(server)
    with pytest.raises(EngineFailure, match=r"no server answers any more"):
        engine_of("http://127.0.0.1:9", max_retries=1)
