"""Requests to one or several servers that serve the same: retried with growing pauses, on the next server each time."""

import json
import logging
import math
import random
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Optional

import urllib3

from pipeline.corpus.backends.base import EngineFailure

log = logging.getLogger(__name__)

RETRIED_STATUSES = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
_FIRST_PAUSE_S, _MAX_PAUSE_S, _CONNECT_TIMEOUT_S = 0.25, 30.0, 10.0
_SHOWN_CHARS, _SAY_EVERY_S = 300, 30.0


class Refused(Exception):
    """The server does not take this request; another one may be taken."""


class Stopped(Exception):
    """The caller has given up meanwhile."""


class _Trouble(Exception):
    """A request that may succeed the next time."""

    def __init__(self, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class _Exhausted(Exception):
    """All attempts failed; says how the last one did."""


@dataclass(frozen=True)
class RetryPolicy:
    """How patient a client is. `timeout_s`: longest silence of a server within a request."""

    max_retries: int
    timeout_s: float


class Servers:
    """A thread-safe client of servers that all serve the same model.

    Args:
        base_urls: `http://host:port/v1` or without the `/v1`.
        api_key: sent as a bearer token.
    """

    def __init__(
        self,
        base_urls: Sequence[str],
        policy: RetryPolicy,
        *,
        num_connections: int,
        api_key: Optional[str] = None,
    ) -> None:
        self.urls = [_with_version(url) for url in base_urls]
        self.policy, self.stop = policy, threading.Event()
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._pool = urllib3.PoolManager(
            num_pools=len(self.urls),
            maxsize=num_connections,
            retries=False,
            timeout=urllib3.Timeout(connect=_CONNECT_TIMEOUT_S, read=policy.timeout_s),
        )
        self._lock = threading.Lock()
        self._next, self._said_s = 0, -math.inf

    def get(self, url: str, path: str) -> Any:
        """The JSON of one server's page, retried.

        Raises:
            EngineFailure: there is none to be had.
        """
        try:
            return self._retried("GET", path, None, [url])
        except Refused as refusal:
            raise EngineFailure(f"{url}{path}: {refusal}") from refusal

    def post(self, path: str, body: dict[str, Any], control: dict[str, Any]) -> Any:
        """The JSON that some server answers, retried.

        Args:
            control: a request that every sound server answers. It is sent when `body` has failed for good, and tells
                whose fault that is.

        Raises:
            Refused: the request is refused for what it is, or fails again and again, twice over, where `control` does not.
            EngineFailure: no server answers, or they refuse everybody.
            Stopped: `close` was called.
        """
        for _ in range(2):  # the servers may have been away for all attempts, and come back
            try:
                return self._retried("POST", path, json.dumps(body).encode(), self.urls)
            except EngineFailure as failure:
                if not isinstance(failure.__cause__, _Exhausted):
                    raise
                reason = str(failure.__cause__)
                self._require_life(path, control, failure)
        raise Refused(reason)

    def _require_life(self, path: str, control: dict[str, Any], failure: EngineFailure) -> None:
        """Raises the failure unless a server answers `control`: each of them has had its attempts at the request."""
        for url in self.urls:
            with suppress(_Trouble):
                self._once("POST", url + path, json.dumps(control).encode())
                return
        raise failure from None

    def _retried(self, method: str, path: str, body: Optional[bytes], urls: Sequence[str]) -> Any:
        first = self._turn()
        for attempt in range(self.policy.max_retries + 1):
            if self.stop.is_set():
                raise Stopped
            try:
                return self._once(method, urls[(first + attempt) % len(urls)] + path, body)
            except _Trouble as error:
                trouble = error
            if attempt < self.policy.max_retries:
                if attempt:
                    self._say(trouble)
                pause_s = min(_FIRST_PAUSE_S * 2**attempt, _MAX_PAUSE_S) * random.uniform(0.5, 1.0)
                self.stop.wait(max(pause_s, trouble.retry_after_s))
        exhausted = _Exhausted(f"{self.policy.max_retries + 1} attempts failed; the last one: {trouble}")
        raise EngineFailure(
            f"corpus.base_urls={list(self.urls)}: no server answers any more ({exhausted}). Finished rows are kept: start the "
            "server and run again to go on from there"
        ) from exhausted

    def _say(self, trouble: _Trouble) -> None:
        """Who waits should know for what; not once for each of many requests."""
        with self._lock:
            is_due = time.monotonic() - self._said_s > _SAY_EVERY_S
            if is_due:
                self._said_s = time.monotonic()
        if is_due:
            log.warning("corpus.base_urls: %s; trying again", trouble)

    def _once(self, method: str, url: str, body: Optional[bytes]) -> Any:
        try:
            response = self._pool.request(method, url, body=body, headers=self._headers)
            if response.status == 200:
                return json.loads(response.data)
        except urllib3.exceptions.HTTPError as error:
            raise _Trouble(f"{url}: {type(error).__name__}: {error}") from error
        except ValueError as error:
            raise _Trouble(f"{url}: an answer that is no whole JSON: {error}") from error
        trouble = f"{url}: HTTP {response.status}: {_shown(response.data)}"
        if response.status in (400, 413, 422):
            raise Refused(trouble)
        if response.status not in RETRIED_STATUSES and response.status < 500:
            raise EngineFailure(
                f"corpus.base_urls: {trouble}. Check the address, corpus.served_model and OPENAI_API_KEY"
            )
        raise _Trouble(trouble, _retry_after_s(response))

    def _turn(self) -> int:
        with self._lock:
            self._next += 1
            return self._next

    def close(self) -> None:
        """Ends all retries and closes the connections."""
        self.stop.set()
        self._pool.clear()


def _retry_after_s(response: urllib3.BaseHTTPResponse) -> float:
    try:
        return min(float(response.headers.get("Retry-After", 0)), _MAX_PAUSE_S)
    except ValueError:
        return 0.0


def _with_version(url: str) -> str:
    url = url.rstrip("/")
    return url if url.endswith("/v1") else f"{url}/v1"


def _shown(data: bytes) -> str:
    return data[:_SHOWN_CHARS].decode(errors="replace").replace("\n", " ")
