"""Milliseconds of prompts and rounds, shared out equally among the rows that were in them."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from specdec_runtime.scheduler import Row


class RoundTimes(NamedTuple):
    """Milliseconds of a round by phase; overhead is what no phase accounts for."""

    draft_ms: float
    verify_ms: float
    overhead_ms: float


def share_prompts(rows: Sequence[Row], *, prefill_ms: float, total_ms: float) -> None:
    """Adds the target's prompt forwards, and the rest of the time that admitting the rows took, to their times."""
    for row in rows:
        row.times.prefill_ms += prefill_ms / len(rows)
        row.times.overhead_ms += max(0.0, total_ms - prefill_ms) / len(rows)


def share_round(rows: Sequence[Row], ms: Mapping[str, float], *, total_ms: float) -> RoundTimes:
    """Adds a round to its rows' times.

    Args:
        ms: by phase, "draft", "verify" and "prefill" (a draft that catches up). total_ms: the whole round.
    """
    draft_ms, verify_ms, prefill_ms = (ms.get(name, 0.0) for name in ("draft", "verify", "prefill"))
    overhead_ms = max(0.0, total_ms - draft_ms - verify_ms - prefill_ms)
    for row in rows:
        row.times.draft_ms += draft_ms / len(rows)
        row.times.verify_ms += verify_ms / len(rows)
        row.times.prefill_ms += prefill_ms / len(rows)
        row.times.overhead_ms += overhead_ms / len(rows)
    return RoundTimes(draft_ms, verify_ms, overhead_ms)
