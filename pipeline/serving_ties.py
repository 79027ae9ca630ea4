"""Where vLLM's text with the draft leaves plain vLLM's: a near tie, or a fault? The bar is measured, not assumed.

In 16 bits the logits move with the number of rows that a step computes, so plain vLLM leaves its own text when the batch
changes. Two plain runs, one with as many rows per step as the other's verification would have, give how far the gap of
the two best tokens moves by that alone. A difference is a near tie when the token is plain decoding's second choice and
the gap there is within what was seen to move. In fp32 next to nothing moves, and the same rule asks for the same text.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from eval.lossless import first_difference
from specdec_runtime.request import Logprobs, Output

#: Best tokens whose log-probabilities are asked for: the two best of one run are nearly always among them in the other.
NUM_TOP = 8
#: Only a small gap can turn over; larger ones, which move more, say nothing about that. In logits.
MAX_GAP = 2.0


@dataclass(frozen=True)
class GapNoise:
    """How much the gap of the two best tokens moves, in logits, between two plain runs after the same tokens.

    `num_identical` of `num_prompts` texts are the same in both; `largest_turned_gap`: the widest gap, as the first run saw
    it, at which the second took another token (0: never).
    """

    rows: tuple[int, int]
    num_prompts: int
    num_identical: int
    num_positions: int
    median: float
    p99: float
    largest: float
    largest_turned_gap: float

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Difference:
    """The first token of an output that is not plain decoding's; None where that output had ended.

    `top2_gap`: of plain decoding's two best tokens there, in logits, as the engine itself computed them.
    `is_second`: the token is plain decoding's second choice (or, after rounding, as good as it).
    """

    prompt: int
    position: int
    plain_token: int | None
    token: int | None
    top2_gap: float
    is_second: bool
    is_near_tie: bool

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)


def gap_noise(one: Sequence[Output], other: Sequence[Output], *, rows: tuple[int, int]) -> GapNoise:
    """Compare two plain greedy runs on the same prompts, up to and with the first token that differs.

    Args:
        one, other: outputs with `NUM_TOP` log-probabilities. rows: what each run computed at most in a step.
    """
    moved: list[float] = []
    turned = [0.0]
    num_identical = 0
    for a, b in zip(one, other, strict=True):
        parted = first_difference(a.token_ids, b.token_ids)
        num_identical += parted is None
        if parted is not None and parted < len(a.token_ids):
            turned.append(top2_gap(_logprobs(a), parted))
        moved += _moves(_logprobs(a), _logprobs(b), parted)
    moved = moved or [0.0]
    return GapNoise(
        rows=rows,
        num_prompts=len(one),
        num_identical=num_identical,
        num_positions=len(moved),
        median=float(np.median(moved)),
        p99=float(np.quantile(moved, 0.99)),
        largest=float(np.max(moved)),
        largest_turned_gap=max(turned),
    )


def _moves(one: Logprobs, other: Logprobs, parted: int | None) -> Iterator[float]:
    """|gap in one - gap of the same two tokens in other|, at each common position where the gap is small."""
    num_common = min(len(one.top_ids), len(other.top_ids))
    if parted is not None:
        num_common = min(num_common, parted + 1)
    for position in range(num_common):
        gap = top2_gap(one, position)
        best, second = one.top_ids[position][:2]
        theirs = dict(zip(other.top_ids[position], other.top_logprobs[position], strict=True))
        if gap <= MAX_GAP and best in theirs and second in theirs:
            yield abs(gap - (theirs[best] - theirs[second]))


def find_differences(
    plain: Sequence[Output], drafted: Sequence[Sequence[int]], *, max_gap: float
) -> list[Difference]:
    """First difference of each output; `max_gap` is what the gap of two best tokens was seen to move."""
    found = []
    for index, (output, token_ids) in enumerate(zip(plain, drafted, strict=True)):
        position = first_difference(output.token_ids, token_ids)
        if position is None:
            continue
        logprobs = _logprobs(output)
        token = token_ids[position] if position < len(token_ids) else None
        plain_token = output.token_ids[position] if position < len(output.token_ids) else None
        gap, is_second = float("inf"), False
        if plain_token is not None:
            values = dict(zip(logprobs.top_ids[position], logprobs.top_logprobs[position], strict=True))
            gap = top2_gap(logprobs, position)
            is_second = token in values and values[token] >= logprobs.top_logprobs[position][1]
        found.append(
            Difference(index, position, plain_token, token, gap, is_second, is_second and gap <= max_gap)
        )
    return found


def top2_gap(logprobs: Logprobs, position: int) -> float:
    """Best log-probability minus second best, which is the gap of their logits."""
    best, second = logprobs.top_logprobs[position][:2]
    return best - second


def _logprobs(output: Output) -> Logprobs:
    assert output.logprobs is not None, "the run asks for them"
    return output.logprobs
