"""A server with OpenAI's /v1/completions in a thread of the test: right answers of the tiny model, and faults to order."""

import copy
import json
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Optional

import torch

from pipeline.corpus.backends.base import FinishedRow, Options
from pipeline.corpus.backends.http import RetryPolicy, Servers
from pipeline.corpus.backends.native import NativeCorpusBackend
from pipeline.corpus.backends.openai import OpenAICorpusBackend
from pipeline.corpus.rows import Row
from tests.unit.pipeline.corpus_samples import tiny_model

FAULTS = ("drop", "500", "429", "truncated", "half")


@dataclass
class FakeServer:
    """What the server does; tests change it.

    `fault_of` says, by the number of the request, which fault it meets. `change` edits a right answer.
    `dies_after`: this many answers are given, then none.
    """

    url: str = ""
    fault_of: Callable[[int], Optional[str]] = lambda number: None
    change: Callable[[dict[str, Any], dict[str, Any]], None] = lambda answer, body: None
    models: tuple[int, bytes] = (200, b'{"data": [{"id": "tiny"}]}')
    max_logprobs: int = 64
    retry_after_s: float = 0.01
    dies_after: Optional[int] = None
    num_requests: int = 0
    num_answers: int = 0
    max_in_flight: int = 0
    answered: list[tuple[int, ...]] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)
    _in_flight: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _model_lock: threading.Lock = field(default_factory=threading.Lock)
    # A copy: while it decodes, its attention is another one, and the test's thread uses the model too.
    _engine: NativeCorpusBackend = field(
        default_factory=lambda: NativeCorpusBackend(copy.deepcopy(tiny_model()), batch_size=1, max_length=512)
    )

    def enter(self) -> Optional[str]:
        """Count a request in; returns the fault that it meets."""
        with self._lock:
            number = self.num_requests
            self.num_requests += 1
            self._in_flight += 1
            self.max_in_flight = max(self.max_in_flight, self._in_flight)
            if self.dies_after is not None and self.num_answers >= self.dies_after:
                return "drop"
        return self.fault_of(number)

    def leave(self) -> None:
        """Count a request out."""
        with self._lock:
            self._in_flight -= 1

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        """What vLLM's server answers to `body`."""
        row = Row(
            prompt_id="x",
            source="",
            domain="",
            prompt_token_ids=tuple(body["prompt"]),
            temperature=body["temperature"],
            top_p=body["top_p"],
            seed=body["seed"],
            sample_index=0,
            max_new_tokens=body["max_tokens"],
            row="",
        )
        options = Options(frozenset(body["stop_token_ids"]), topk=body.get("logprobs", 0))
        with self._model_lock:
            finished = next(self._engine.generate(iter([row]), options))
        assert finished.failure is None
        with self._lock:
            self.num_answers += 1
            self.answered.append(row.prompt_token_ids)
        choice = {
            "index": 0,
            "text": "never used",
            "token_ids": finished.token_ids,
            "prompt_token_ids": body["prompt"],
            "finish_reason": finished.finish_reason,
            "logprobs": _logprobs(finished) if options.topk else None,
        }
        answer = {"choices": [choice]}
        self.change(answer, body)
        return answer


def _logprobs(finished: FinishedRow) -> dict[str, Any]:
    assert finished.topk_ids is not None and finished.topk_logprobs is not None
    pairs = zip(finished.topk_ids.tolist(), finished.topk_logprobs.tolist(), strict=True)
    tops = []
    for token, (ids, logprobs) in zip(finished.token_ids, pairs, strict=True):
        top = {f"token_id:{i}": p for i, p in zip(ids, logprobs, strict=True)}
        top.setdefault(f"token_id:{token}", min(logprobs) - 1.0)
        tops.append(top)
    return {"top_logprobs": tops}


class _Handler(BaseHTTPRequestHandler):
    fake: FakeServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        self._send(*self.fake.models)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.fake.headers = dict(self.headers)
        fault = self.fake.enter()
        try:
            if fault == "drop":
                self.close_connection = True
                return
            if fault is not None and fault.isdigit():
                self._send(int(fault), b"try again", retry_after=str(self.fake.retry_after_s))
                return
            if body.get("logprobs", 0) > self.fake.max_logprobs:
                self._send(400, b'{"error": "logprobs is greater than max allowed"}')
                return
            if len(body["prompt"]) + body["max_tokens"] > 512:
                self._send(400, b'{"error": "too long"}')
                return
            data = json.dumps(self.fake.answer(body)).encode()
            if fault == "half":  # the connection is lost in the middle of an answer
                self._send(200, data[: len(data) // 2], num_bytes=len(data))
                self.close_connection = True
                return
            self._send(200, data[: len(data) // 2] if fault == "truncated" else data)
        finally:
            self.fake.leave()

    def _send(
        self, status: int, data: bytes, *, retry_after: Optional[str] = None, num_bytes: Optional[int] = None
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data) if num_bytes is None else num_bytes))
        if retry_after:
            self.send_header("Retry-After", retry_after)
        with suppress(ConnectionError):  # a client that does not wait any longer
            self.end_headers()
            self.wfile.write(data)


def _http_server(fake: FakeServer, port: int) -> ThreadingHTTPServer:
    server = ThreadingHTTPServer(("127.0.0.1", port), type("Handler", (_Handler,), {"fake": fake}))
    server.daemon_threads = True
    return server


def serve(port: int) -> None:
    """A server that ends when its process does: the program that the tests kill."""
    torch.set_num_threads(1)
    _http_server(FakeServer(), port).serve_forever()


@contextmanager
def fake_server() -> Iterator[FakeServer]:
    """Serves on a free port of the loopback while the block runs."""
    fake = FakeServer()
    server = _http_server(fake, 0)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    fake.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    try:
        yield fake
    finally:
        server.shutdown()
        server.server_close()


def faults(seed: int, share: float) -> Callable[[int], Optional[str]]:
    """A share of all requests meets one of `FAULTS`."""

    def fault_of(number: int) -> Optional[str]:
        drawn = random.Random(f"{seed}:{number}")
        return drawn.choice(FAULTS) if drawn.random() < share else None

    return fault_of


def engine_of(
    *servers: FakeServer | str, max_retries: int = 8, num_in_flight: int = 8, **settings: Any
) -> OpenAICorpusBackend:
    """A client of these servers."""
    urls = [server if isinstance(server, str) else server.url for server in servers]
    client = Servers(urls, RetryPolicy(max_retries, 20.0), num_connections=num_in_flight, **settings)
    return OpenAICorpusBackend(client, served_model=None, num_in_flight=num_in_flight, extra={})
