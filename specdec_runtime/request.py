"""What goes into the engine and what comes out: requests, outputs, streamed events."""

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Optional

from specdec_runtime.stats import Stats

# In fp32, logits that are changed by more than this, or divided by less, may overflow: infinity minus infinity is no number.
_MAX_CHANGE = 1e15
_MIN_TEMPERATURE = 1e-20

_WHOLE_NUMBERS = ("max_new_tokens", "min_new_tokens")
_OPTIONAL_WHOLE_NUMBERS = ("top_k", "seed", "logprobs")
_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty")


@dataclass
class Request:
    """One prompt and how it is to be continued. Every parameter is applied to the target's distribution p and to the
    draft's distribution q; none is ignored.

    The order of the warpers is: logit_bias, repetition_penalty, presence_penalty, min_new_tokens, temperature,
    top_k, top_p, min_p.

    Args:
        prompt_token_ids: at least one id.
        max_new_tokens: hard cap on generated tokens.
        min_new_tokens: no EOS, no stop id and no stop string before this many generated tokens.
        temperature: 0 is greedy (the argmax after bias and penalties).
        top_k: keep the k most likely ids; None keeps all.
        top_p: keep the smallest set of ids whose mass reaches top_p; 1 keeps all (Holtzman et al. 2019).
        min_p: keep ids with at least min_p times the mass of the most likely one; 0 keeps all.
        repetition_penalty: > 1 divides positive and multiplies negative logits of ids seen in prompt or output (CTRL).
        presence_penalty: subtracted from the logits of ids seen in the output.
        logit_bias: id -> number added to its logit; -inf bans the id.
        stop_token_ids: further ids that end the output like EOS does (the id is kept in the output).
        stop: strings that end the output; text, ids and logprobs are cut before the string. Needs a `detokenize`.
        ignore_eos: go on past the model's EOS; `stop_token_ids` still end the output.
        seed: None draws one from torch's global generator.
        logprobs: number of most likely ids, with their log-probabilities under the raw target distribution (no
            warper, temperature 1), to return for each generated token. 0 returns the chosen token's only.
        speculate: False decodes this request plainly, next to others that speculate.

    Raises:
        ValueError: a value is out of range; names the field, the value and the way out.
    """

    prompt_token_ids: Sequence[int]
    max_new_tokens: int = 128
    min_new_tokens: int = 0
    temperature: float = 0.0
    top_k: Optional[int] = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    logit_bias: Optional[dict[int, float]] = None
    stop_token_ids: Sequence[int] = ()
    stop: Sequence[str] = ()
    ignore_eos: bool = False
    seed: Optional[int] = None
    logprobs: Optional[int] = None
    speculate: bool = True

    def __post_init__(self) -> None:
        self.prompt_token_ids = flat_ids("prompt_token_ids", self.prompt_token_ids)
        self.stop_token_ids = flat_ids("stop_token_ids", self.stop_token_ids)
        self.logit_bias = _biases(self.logit_bias)
        self.stop = _texts("stop", self.stop)
        for name in (*_WHOLE_NUMBERS, *_OPTIONAL_WHOLE_NUMBERS, *_NUMBERS):
            value = getattr(self, name)
            if value is not None or name not in _OPTIONAL_WHOLE_NUMBERS:
                setattr(self, name, _number(name, value))
        if not self.prompt_token_ids:
            raise ValueError(
                "prompt_token_ids=[]: a request needs at least one token (put a BOS token there)"
            )
        if any(text == "" for text in self.stop):
            raise ValueError("stop contains an empty string, which is found everywhere: leave it out")
        checks = (
            ("max_new_tokens", self.max_new_tokens >= 1, "must be >= 1"),
            (
                "min_new_tokens",
                0 <= self.min_new_tokens <= self.max_new_tokens,
                "must lie in [0, max_new_tokens]",
            ),
            (
                "temperature",
                self.temperature == 0 or _MIN_TEMPERATURE <= self.temperature < math.inf,
                f"must be 0 (greedy) or a number from {_MIN_TEMPERATURE:g} on",
            ),
            ("top_k", self.top_k is None or self.top_k >= 1, "must be >= 1, or None to keep all ids"),
            ("top_p", 0 < self.top_p <= 1, "must lie in (0, 1]"),
            ("min_p", 0 <= self.min_p <= 1, "must lie in [0, 1]"),
            (
                "repetition_penalty",
                1 / _MAX_CHANGE <= self.repetition_penalty <= _MAX_CHANGE,
                f"must lie in [{1 / _MAX_CHANGE:g}, {_MAX_CHANGE:g}] (1 is none)",
            ),
            (
                "presence_penalty",
                abs(self.presence_penalty) <= _MAX_CHANGE,
                f"must be a number within +-{_MAX_CHANGE:g}",
            ),
            ("logprobs", self.logprobs is None or self.logprobs >= 0, "must be >= 0, or None for none"),
        )
        for name, is_right, hint in checks:
            if not is_right:
                raise ValueError(f"{name}={getattr(self, name)}: {hint}")


def _number(name: str, value: Any) -> int | float:
    """A number from an array or a table is made Python's, whose arithmetic has no width."""
    try:
        return float(value) if name in _NUMBERS else operator.index(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}={value!r}: must be a {'' if name in _NUMBERS else 'whole '}number") from error


def _texts(name: str, texts: Any) -> tuple[str, ...]:
    """One string is a list of one."""
    found = (texts,) if isinstance(texts, str) or not isinstance(texts, Iterable) else tuple(texts)
    if texts is None:
        return ()
    if not all(isinstance(text, str) for text in found):
        raise ValueError(f"{name}={texts!r:.80}: give strings (token ids that end an output are stop_token_ids)")
    return found


def flat_ids(name: str, ids: Any) -> list[int]:
    """Ids of one request, from a list, an array or a tensor; a single id is a list of one."""
    values = ids.tolist() if hasattr(ids, "tolist") else ids
    try:
        return [operator.index(value) for value in ([values] if isinstance(values, int) else values)]
    except TypeError as error:
        raise ValueError(
            f"{name}={ids!r:.80}: give the token ids of one request, a flat list of whole numbers (of a batch, row by row)"
        ) from error


def _biases(biases: Optional[Mapping[Any, Any]]) -> Optional[dict[int, float]]:
    """As numbers: JSON has the ids as text."""
    if not biases:
        return None
    try:
        numbers = {
            int(token_id) if isinstance(token_id, str) else operator.index(token_id): float(bias)
            for token_id, bias in biases.items()
        }
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"logit_bias={biases!r:.80}: give a number for each token id") from error
    for token_id, bias in numbers.items():
        if not bias <= _MAX_CHANGE:
            raise ValueError(
                f"logit_bias={{{token_id}: {bias}}}: must be at most {_MAX_CHANGE:g}, or -inf, which bans the id"
            )
    return numbers


@dataclass
class Logprobs:
    """Per generated token, under the raw target distribution. The three lists have one entry per token."""

    token_logprobs: list[float] = field(default_factory=list)
    top_ids: list[list[int]] = field(default_factory=list)
    top_logprobs: list[list[float]] = field(default_factory=list)

    def truncate(self, num_tokens: int) -> None:
        """Keeps the first `num_tokens` entries."""
        for values in (self.token_logprobs, self.top_ids, self.top_logprobs):
            del values[num_tokens:]


@dataclass
class Output:
    """What a request gave.

    Args:
        token_ids: generated ids only; an EOS or stop id that ended the output is the last of them.
        finish_reason: "stop" (EOS, stop id or stop string) or "length" (max_new_tokens).
        text: decoded output when the decoder has a `detokenize`, cut before a stop string.
        token_times_s: seconds from the start of the call to the commit of each token.
        lossless: False when a lossy acceptance rule was in force.
    """

    token_ids: list[int]
    finish_reason: str
    stats: Stats
    logprobs: Optional[Logprobs] = None
    text: Optional[str] = None
    token_times_s: list[float] = field(default_factory=list)
    lossless: bool = True


@dataclass
class StreamEvent:
    """Tokens of one request, as they are committed; the last event of a request has a finish_reason and the output."""

    request_index: int
    token_ids: list[int]
    finish_reason: Optional[str] = None
    output: Optional[Output] = None
