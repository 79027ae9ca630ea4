"""The contract of every engine that answers prompts for the corpus: rows go in as a stream, and come back as they finish.

Shape legend: N tokens of a response, K stored candidates.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Optional, Protocol

import numpy as np
import numpy.typing as npt

from pipeline.corpus.rows import Row

_MIN_SHARED_TOKENS = 4
NON_FINITE = "non_finite_logits"
REFUSED = "refused_by_engine"


@dataclass
class FinishedRow:
    """What was generated: the ids exactly as sampled, a stop token included; a cut text has none.

    `topk_ids` int32 [N, K] and `topk_logprobs` float16 [N, K] are the log-softmax of the raw logits at temperature 1,
    most likely first; None where none were asked for. `failure` names why a row came to nothing.
    """

    row: Row
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = "length"
    topk_ids: Optional[npt.NDArray[np.int32]] = None
    topk_logprobs: Optional[npt.NDArray[np.float16]] = None
    failure: Optional[str] = None


@dataclass(frozen=True)
class Options:
    """What holds for all rows of a call.

    Args:
        stop_token_ids: ids that end a response and are kept in it.
        topk: stored candidates per token; no effect on what is sampled.
        shared_prefix: tokens with which many prompts begin; an engine may run them once. It must not depend on which
            rows are left to do: in bf16 it decides how numbers are rounded.
        on_tokens: told of the number of new tokens as they come.
    """

    stop_token_ids: frozenset[int]
    topk: int = 0
    shared_prefix: tuple[int, ...] = ()
    on_tokens: Optional[Callable[[int], None]] = None

    def report(self, num_tokens: int) -> None:
        """Pass on the number of new tokens."""
        if self.on_tokens is not None and num_tokens:
            self.on_tokens(num_tokens)


class CorpusBackend(Protocol):
    """An engine. `name` is what `corpus.json` shows."""

    name: str

    def generate(self, rows: Iterable[Row], options: Options) -> Iterator[FinishedRow]:
        """Answer every row, in any order, each exactly once.

        `rows` is read as places come free, never far ahead of what has finished. A row that cannot be answered comes
        back with its `failure`; the others go on.

        Raises:
            EngineFailure: the engine is gone, or answers in a form that cannot be used.
        """
        ...

    def close(self) -> None:
        """Give processes, memory and connections back."""
        ...


class EngineFailure(ValueError):
    """The engine cannot go on. What was written is kept, and the next run goes on from there."""


def generate_in_order(backend: CorpusBackend, rows: Sequence[Row], options: Options) -> list[FinishedRow]:
    """All results in the order of `rows`, which must be different rows."""
    results = {finished.row: finished for finished in backend.generate(iter(rows), options)}
    assert len(results) == len(rows), "a backend lost a row or returned one twice"
    return [results[row] for row in rows]


def common_prefix(rows: Iterable[Row]) -> tuple[int, ...]:
    """The tokens with which all prompts begin, each one's last token left out; none where they are too few to matter."""
    prompts = [row.prompt_token_ids for row in rows]
    if len(prompts) < 2:
        return ()
    first, last = min(prompts), max(prompts)
    longest = min(len(prompt) for prompt in prompts) - 1
    num = next((i for i in range(longest) if first[i] != last[i]), longest)
    return first[:num] if num >= _MIN_SHARED_TOKENS else ()


def misfit(row: Row, *, context: int, vocab_size: int) -> Optional[str]:
    """Why a row cannot be given to any engine of this target, or None."""
    if not row.prompt_token_ids:
        return "empty_prompt"
    if len(row.prompt_token_ids) + row.max_new_tokens > context:
        return "longer_than_context"
    if not 0 <= min(row.prompt_token_ids) <= max(row.prompt_token_ids) < vocab_size:
        return "ids_outside_vocabulary"
    return None
