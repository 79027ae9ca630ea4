"""The row accounting of a corpus: requested = written + skipped + failed, each row counted once, with its reason."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

_NUM_NAMED = 10


@dataclass
class Accounting:
    """Counts by reason; the first few rows of each reason are named (their number in the source)."""

    num_requested: int = 0
    num_written: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)
    finish_reason: Counter[str] = field(default_factory=Counter)
    num_response_tokens: int = 0
    num_prompt_tokens: int = 0

    def skip(self, reason: str, row: str) -> None:
        """Count a row that is left out on purpose."""
        self.skipped[reason] += 1
        self._name(reason, row)

    def fail(self, reason: str, row: str) -> None:
        """Count a row that should have been written and was not."""
        self.failed[reason] += 1
        self._name(reason, row)

    def write(self, *, finish_reason: str, num_prompt_tokens: int, num_response_tokens: int) -> None:
        """Count a row that lies in a shard."""
        self.num_written += 1
        self.finish_reason[finish_reason] += 1
        self.num_prompt_tokens += num_prompt_tokens
        self.num_response_tokens += num_response_tokens

    def _name(self, reason: str, row: str) -> None:
        named = self.examples.setdefault(reason, [])
        if len(named) < _NUM_NAMED:
            named.append(row)

    def to_dict(self) -> dict[str, Any]:
        """The content of `corpus.json`."""
        num_skipped, num_failed = self.skipped.total(), self.failed.total()
        assert self.num_requested == self.num_written + num_skipped + num_failed, (
            "a row was lost or counted twice"
        )
        return {
            "requested": self.num_requested,
            "written": self.num_written,
            "skipped": dict(sorted(self.skipped.items())),
            "failed": dict(sorted(self.failed.items())),
            "num_skipped": num_skipped,
            "num_failed": num_failed,
            "examples": dict(sorted(self.examples.items())),
            "finish_reason": {reason: self.finish_reason[reason] for reason in ("stop", "length")},
            "num_truncated": self.finish_reason["length"],
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_response_tokens": self.num_response_tokens,
        }
