"""What runs in an actor of `corpus.backend=ray`: an engine of this project, on tables of rows.

Nothing here needs Ray. Tables carry the ids as they are, and the candidates as the bytes of their arrays.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from pipeline.corpus.backends.base import CorpusBackend, EngineFailure, FinishedRow, Options
from pipeline.corpus.rows import Row
from pipeline.corpus.target_info import load_target_info
from pipeline.models import ModelRef
from pipeline.schema import Config

log = logging.getLogger(__name__)

_PROMPT_SCHEMA = pa.schema(
    [
        ("prompt_id", pa.string()),
        ("source", pa.string()),
        ("domain", pa.string()),
        ("prompt_token_ids", pa.list_(pa.int32())),
        ("temperature", pa.float64()),
        ("top_p", pa.float64()),
        ("seed", pa.int64()),
        ("sample_index", pa.int64()),
        ("max_new_tokens", pa.int64()),
        ("row", pa.string()),
    ]
)
_ANSWER_SCHEMA = pa.schema(
    [
        *_PROMPT_SCHEMA,
        ("token_ids", pa.list_(pa.int32())),
        ("finish_reason", pa.string()),
        ("topk_ids", pa.binary()),
        ("topk_logprobs", pa.binary()),
        ("failure", pa.string()),
    ]
)


@dataclass(frozen=True)
class EngineSpec:
    """What an actor makes its engine from. `config.corpus.backend` is that engine; the target's folder has to be there
    for every machine."""

    config: Config
    target: ModelRef


class EngineActor:
    """One engine, which answers a table of rows at a time.

    The engine is made by the first call and not with the actor, so that what it says reaches the caller as it is. One that
    fails is started once more: its process may have been killed, while this one was not.
    """

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        self.backend: CorpusBackend | None = None

    def start(self) -> CorpusBackend:
        """The engine, which is there afterwards.

        Raises:
            ValueError: it cannot be made.
        """
        from pipeline.corpus.backends import open_engine  # which imports the other side of this one

        config, ref = self.spec.config, self.spec.target
        self.backend = open_engine(config, ref, load_target_info(ref.path, ref.trust_remote_code))
        return self.backend

    def is_ready(self) -> bool:
        """Comes back when the engine is there; raises as `start`."""
        self.start()
        return True

    def answer(self, prompts: pa.Table, options: Options) -> pa.Table:
        """All answers, as one table: a call that is made again gives the same one.

        Raises:
            ValueError: as `start`, or the engine fails twice on these rows.
        """
        rows, backend = prompt_rows(prompts), self.backend or self.start()
        try:
            return answer_table(list(backend.generate(iter(rows), options)))
        except EngineFailure as failure:
            log.warning("the engine is started anew: %s", failure)
            backend.close()
            return answer_table(list(self.start().generate(iter(rows), options)))


def prompt_table(rows: Sequence[Row]) -> pa.Table:
    """Rows on their way to an engine."""
    return pa.Table.from_pydict(_row_columns(rows), schema=_PROMPT_SCHEMA)


def _row_columns(rows: Sequence[Row]) -> dict[str, list[object]]:
    return {name: [getattr(row, name) for row in rows] for name in _PROMPT_SCHEMA.names}


def prompt_rows(table: pa.Table) -> list[Row]:
    """The rows of a table that `prompt_table` or `answer_table` made."""
    columns = table.select(_PROMPT_SCHEMA.names).to_pylist()
    return [
        Row(**{**values, "prompt_token_ids": tuple(values["prompt_token_ids"])}) for values in columns
    ]


def answer_table(finished: Sequence[FinishedRow]) -> pa.Table:
    """Answers on their way back."""
    columns: dict[str, list[object]] = {
        **_row_columns([one.row for one in finished]),
        "token_ids": [one.token_ids for one in finished],
        "finish_reason": [one.finish_reason for one in finished],
        "topk_ids": [None if one.topk_ids is None else one.topk_ids.tobytes() for one in finished],
        "topk_logprobs": [
            None if one.topk_logprobs is None else one.topk_logprobs.tobytes() for one in finished
        ],
        "failure": [one.failure for one in finished],
    }
    return pa.Table.from_pydict(columns, schema=_ANSWER_SCHEMA)


def finished_rows(table: pa.Table, topk: int) -> Iterator[FinishedRow]:
    """The answers of a table that `answer_table` made, with `topk` candidates for each token."""
    names = ("token_ids", "finish_reason", "topk_ids", "topk_logprobs", "failure")
    answers: Iterable[tuple[object, ...]] = zip(*(table.column(name).to_pylist() for name in names), strict=True)
    for row, (token_ids, finish_reason, ids, logprobs, failure) in zip(prompt_rows(table), answers, strict=True):
        finished = FinishedRow(row, token_ids, finish_reason, failure=failure)  # type: ignore[arg-type]
        if ids is not None:
            finished.topk_ids = np.frombuffer(ids, np.int32).reshape(-1, topk).copy()  # type: ignore[call-overload]
            finished.topk_logprobs = np.frombuffer(logprobs, np.float16).reshape(-1, topk).copy()  # type: ignore[call-overload]
        yield finished


def engine_spec(config: Config, target: ModelRef) -> EngineSpec:
    """What makes the engine of `corpus.ray_engine`, as it would be in the stage's process."""
    corpus = replace(config.corpus, backend=config.corpus.ray_engine or "vllm", ray_engine=None, ray_address=None)
    return EngineSpec(replace(config, corpus=corpus), replace(target, path=str(Path(target.path).absolute())))
