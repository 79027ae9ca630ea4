"""Is the output really unchanged? Greedy outputs against plain decoding's, and what a difference is made of.

In fp32 the tokens are the same. In bf16 kernels round differently by width, and a model is often near a tie:
then plain decoding at the verification's width gives the same tokens, which shows that speculation changed
nothing, and a difference against width 1 is shown with the gap between the two best logits at that position.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from transformers import PreTrainedModel

from eval.head import Head, evaluating
from eval.teacher_forcing import ResponseRow, response_hidden_states


@dataclass(frozen=True)
class Mismatch:
    """The first position where an output leaves plain decoding's.

    `token` is None where the output had already ended. `top2_gap`: fp32 logit of the target's best id minus
    that of its second best there; `is_near_tie`: the gap is within what the dtype's rounding can turn over.
    """

    prompt: int
    position: int
    plain_token: int | None
    token: int | None
    top2_gap: float
    is_near_tie: bool

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """The first index at which they differ (for a prefix, its length), None when they do not."""
    if list(a) == list(b):
        return None
    pairs = zip(a, b, strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))


def find_mismatches(
    target: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    plain: Sequence[Sequence[int]],
    outputs: Sequence[Sequence[int]],
) -> list[Mismatch]:
    """First mismatch of each output that differs from plain decoding's, over the shorter list."""
    head: Head | None = None
    found = []
    for index, (prompt, expected, got) in enumerate(zip(prompts, plain, outputs, strict=False)):
        position = first_difference(expected, got)
        if position is None:
            continue
        head = head or Head(target, int(target.get_output_embeddings().weight.shape[0]))
        gap, largest = top2_gap(target, head, [*prompt, *expected[:position]])
        found.append(
            Mismatch(
                prompt=index,
                position=position,
                plain_token=expected[position] if position < len(expected) else None,
                token=got[position] if position < len(got) else None,
                top2_gap=gap,
                is_near_tie=gap <= near_tie_gap(largest, target.dtype),
            )
        )
    return found


def top2_gap(target: PreTrainedModel, head: Head, token_ids: Sequence[int]) -> tuple[float, float]:
    """(best logit minus second best, magnitude of the best) after these tokens; the head in fp32."""
    row = ResponseRow("", "", list(token_ids), [0], 0.0)
    with evaluating(target):
        best, second = head.top_logits(response_hidden_states(target, [row]), 2)[0].tolist()
    return best - second, abs(best)


def near_tie_gap(largest_logit: float, dtype: torch.dtype) -> float:
    """Gaps that rounding can turn over: up to twice the dtype's spacing around the best logit."""
    return 2 * torch.finfo(dtype).eps * max(largest_logit, 1.0)
