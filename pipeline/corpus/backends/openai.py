"""Any server with OpenAI's /v1/completions that takes and gives token ids (vLLM, SGLang): nothing is ever re-tokenized."""

import queue
import threading
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Any, Optional, Union

import numpy as np

from pipeline.corpus.backends.base import NON_FINITE, REFUSED, EngineFailure, FinishedRow, Options
from pipeline.corpus.backends.candidates import pack, require_raw
from pipeline.corpus.backends.http import Refused, Servers
from pipeline.corpus.rows import Row

_ID_PREFIX = "token_id:"
_OLDEST_LOGPROB = -9999.0  # what servers write for minus infinity
Result = Union[FinishedRow, BaseException]


class OpenAICorpusBackend:
    """Many requests in flight over one or several servers of the same model.

    Args:
        served_model: the name that the servers know it by; None for the only one they have.
        num_in_flight: requests under way at a time.
        extra: further fields of each request.

    Raises:
        EngineFailure: a server cannot be reached, or the servers do not all have the model.
    """

    name = "openai"

    def __init__(
        self, servers: Servers, *, served_model: Optional[str], num_in_flight: int, extra: dict[str, Any]
    ) -> None:
        self.servers, self.num_in_flight, self.extra = servers, num_in_flight, extra
        self.model = self._model(served_model)

    def _model(self, wanted: Optional[str]) -> str:
        found: Optional[str] = None
        for url in self.servers.urls:
            listed = _model_ids(url, self.servers.get(url, "/models"))
            wanted = wanted or found
            if (wanted not in listed) if wanted else len(listed) != 1:
                raise EngineFailure(
                    f"corpus.served_model={wanted}: {url} serves {listed}; name one that all servers have"
                )
            found = wanted or listed[0]
        assert found is not None
        return found

    def generate(self, rows: Iterable[Row], options: Options) -> Iterator[FinishedRow]:
        """See `CorpusBackend.generate`."""
        rows = iter(rows)
        first = next(rows, None)
        if first is None:
            return
        if options.topk:
            self._probe(first, options)
        yield from self._in_parallel(chain([first], rows), options)

    def _probe(self, row: Row, options: Options) -> None:
        try:
            require_raw(lambda probe: self._ask(probe, options), row, engine=f"the server of {self.model!r}")
        except Refused as refused:
            raise EngineFailure(
                f"corpus.backend=openai: a request for one token is refused: {refused}"
            ) from refused

    def _in_parallel(self, rows: Iterator[Row], options: Options) -> Iterator[FinishedRow]:
        to_do: queue.SimpleQueue[Optional[Row]] = queue.SimpleQueue()
        results: queue.SimpleQueue[Result] = queue.SimpleQueue()

        def work() -> None:
            while (row := to_do.get()) is not None:
                try:
                    results.put(self._answer(row, options))
                except BaseException as error:  # handed to the thread that reads the results
                    results.put(error)

        # Daemons: a server that went silent must not keep the program from ending.
        threads = [threading.Thread(target=work, daemon=True) for _ in range(self.num_in_flight)]
        for thread in threads:
            thread.start()
        num_under_way = 0
        failure: Optional[BaseException] = None
        try:
            while True:
                if failure is None:
                    for row in islice(rows, self.num_in_flight - num_under_way):
                        to_do.put(row)
                        num_under_way += 1
                if not num_under_way:
                    break
                result = results.get()
                num_under_way -= 1
                if isinstance(result, FinishedRow):
                    options.report(len(result.token_ids))
                    yield result
                elif failure is None:  # those under way may still come in: what they give is kept
                    failure = result
                    self.servers.stop.set()
        finally:
            for _ in threads:
                to_do.put(None)
        if failure is not None:
            raise failure

    def _answer(self, row: Row, options: Options) -> FinishedRow:
        try:
            return self._ask(row, options)
        except Refused as refused:
            return FinishedRow(row, failure=f"{REFUSED}: {_reason(refused)}")

    def _ask(self, row: Row, options: Options) -> FinishedRow:
        body = self.body(row, options)
        control = {**body, "prompt": body["prompt"][:1], "max_tokens": 1}
        return read_answer(self.servers.post("/completions", body, control), row, options)

    def body(self, row: Row, options: Options) -> dict[str, Any]:
        """The request for a row."""
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": list(row.prompt_token_ids),
            "max_tokens": row.max_new_tokens,
            "temperature": row.temperature,
            "top_p": row.top_p,
            "seed": row.seed,
            # Stated, because servers take what is left out from the model's generation config.
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "stop_token_ids": sorted(options.stop_token_ids),
            "ignore_eos": True,  # the caller's ids are all that end a text
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            **self.extra,
        }
        if options.topk:
            body["logprobs"] = options.topk
        return body

    def close(self) -> None:
        """Closes the connections."""
        self.servers.close()


def read_answer(answer: Any, row: Row, options: Options) -> FinishedRow:
    """A server's completion as a row, every id checked.

    Raises:
        EngineFailure: ids or log-probabilities are missing, or do not fit the request.
    """
    choice = _part(answer, "choices")[0]
    token_ids, prompt_ids = choice.get("token_ids"), choice.get("prompt_token_ids")
    if token_ids is None or prompt_ids is None:
        raise EngineFailure(
            "corpus.backend=openai: the server returns no token ids (it does not know return_token_ids), and to tokenize "
            "its text anew would change the corpus. Use a server that does: vLLM >= 0.10.2, a recent SGLang"
        )
    if list(prompt_ids) != list(row.prompt_token_ids):
        raise EngineFailure(
            f"corpus.backend=openai: the server changed the prompt's token ids ({len(row.prompt_token_ids)} were sent, "
            f"{len(prompt_ids)} came back): does it have the target's tokenizer and context length?"
        )
    finish_reason = choice.get("finish_reason")
    if finish_reason not in ("stop", "length"):
        return FinishedRow(row, failure=f"engine_{finish_reason}")
    _check_end(token_ids, finish_reason, row, options)
    finished = FinishedRow(row, token_ids, finish_reason)
    if options.topk:
        per_token = [_candidates(entry) for entry in _part(_part(choice, "logprobs"), "top_logprobs")]
        if len(per_token) != len(token_ids):
            raise EngineFailure(
                f"corpus.backend=openai: log-probabilities of {len(per_token)} tokens came for {len(token_ids)} tokens"
            )
        finished.topk_ids, finished.topk_logprobs = pack(per_token, options.topk, engine="the server")
        if not (finished.topk_logprobs[:, 0].astype(np.float32) > _OLDEST_LOGPROB).all():
            return FinishedRow(row, failure=NON_FINITE)
    return finished


def _check_end(token_ids: list[int], finish_reason: str, row: Row, options: Options) -> None:
    ends = [position for position, token in enumerate(token_ids) if token in options.stop_token_ids]
    is_right = ends == [len(token_ids) - 1] if finish_reason == "stop" else not ends
    if not is_right or not 0 < len(token_ids) <= row.max_new_tokens:
        raise EngineFailure(
            f"corpus.backend=openai: a response of {len(token_ids)} tokens with finish_reason={finish_reason!r} has stop tokens at "
            f"{ends[:3]}: the server leaves them out or goes on past them (SGLang: corpus.engine_args={{no_stop_trim: true}})"
        )


def _model_ids(url: str, answer: Any) -> list[str]:
    try:
        return [str(entry["id"]) for entry in answer["data"]]
    except (KeyError, TypeError) as error:
        raise EngineFailure(
            f"corpus.base_urls: {url}/models is no list of models: {str(answer)[:300]}. Give the address that ends in /v1"
        ) from error


def _candidates(entry: Any) -> dict[int, float]:
    if not isinstance(entry, dict) or not all(key.startswith(_ID_PREFIX) for key in entry):
        raise EngineFailure(
            "corpus.backend=openai: the server names the candidates by their text, which stands for no certain id. Set "
            "corpus.rescore=true: the log-probabilities are then computed here"
        )
    return {int(key[len(_ID_PREFIX) :]): float(value) for key, value in entry.items()}


def _part(answer: Any, name: str) -> Any:
    part = answer.get(name) if isinstance(answer, dict) else None
    if not part:
        raise EngineFailure(
            f"corpus.backend=openai: the server's answer has no {name!r}: {str(answer)[:300]}"
        )
    return part


def _reason(refused: Refused) -> str:
    """What is counted together: the status, not the whole message."""
    text = str(refused)
    return text[text.index("HTTP") :].split(":")[0] if "HTTP" in text else "no answer"
