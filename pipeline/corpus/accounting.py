"""The row accounting of a corpus: requested = written + skipped + failed, each row counted once, with its reason."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.corpus.answer_folder import failed_rows, shard_tables

_NUM_NAMED = 10
_COUNTED = ["finish_reason", "prompt_token_ids", "response_token_ids"]


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

    def write(self, table: pa.Table) -> None:
        """Count the rows of a shard, of which `_COUNTED` columns are enough; its failed rows too."""
        self.num_written += len(table)
        self.finish_reason.update(table.column("finish_reason").to_pylist())
        self.num_prompt_tokens += _num_items(table.column("prompt_token_ids"))
        self.num_response_tokens += _num_items(table.column("response_token_ids"))
        for failed in failed_rows(table.schema):
            self.fail(failed.reason, failed.row)

    def count_shards(self, files: Sequence[Path]) -> None:
        """Count what lies on disk, shard by shard."""
        for table in shard_tables(files, _COUNTED):
            self.write(table)

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
            "skipped": _sorted(self.skipped.items()),
            "failed": _sorted(self.failed.items()),
            "num_skipped": num_skipped,
            "num_failed": num_failed,
            "examples": {reason: sorted(rows) for reason, rows in sorted(self.examples.items())},
            "finish_reason": {reason: self.finish_reason[reason] for reason in ("stop", "length")},
            "num_truncated": self.finish_reason["length"],
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_response_tokens": self.num_response_tokens,
        }


def _sorted(items: Iterable[tuple[str, int]]) -> dict[str, int]:
    return dict(sorted(items))


def _num_items(column: pa.ChunkedArray) -> int:
    return int(pc.sum(pc.list_value_length(column)).as_py() or 0)
