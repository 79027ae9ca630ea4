"""What a corpus consists of, counted in one walk over its shards: memory does not grow with their number."""

import hashlib
import heapq
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Optional

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pipeline.corpus.answer_folder import shard_tables
from pipeline.corpus.hash_table import HashSet

#: The stored probabilities of this many tokens are read, from shards evenly spaced over the corpus.
MAX_MASS_TOKENS = 2_000_000
NUM_SAMPLES = 20
#: Answers that occur as often as this, or more often, are counted together.
MAX_COPIES = 8
_NGRAM = 4
_NUM_BINS = 1000
_LIGHT = [
    "prompt_id", "source", "domain", "prompt_token_ids", "response_token_ids", "finish_reason", "temperature", "top_p", "seed",
]  # fmt: skip


@dataclass
class Group:
    """Rows that have something in common."""

    num_rows: int = 0
    num_tokens: int = 0
    num_cut: int = 0

    def add(self, num_tokens: int, is_cut: bool) -> None:
        """Count one row."""
        self.num_rows += 1
        self.num_tokens += num_tokens
        self.num_cut += is_cut


@dataclass
class Shares:
    """A histogram of numbers in [0, 1]."""

    counts: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(_NUM_BINS, np.int64))
    total: float = 0.0

    def add(self, values: npt.NDArray[np.float64]) -> None:
        """Count numbers; rounding may put one a little above 1."""
        values = np.clip(values, 0.0, 1.0)
        self.counts += np.histogram(values, bins=_NUM_BINS, range=(0.0, 1.0))[0]
        self.total += float(values.sum())

    @property
    def num(self) -> int:
        """How many there are."""
        return int(self.counts.sum())

    @property
    def mean(self) -> float:
        """Their mean; nan for none."""
        return self.total / self.num if self.num else math.nan

    def quantile(self, share: float) -> float:
        """The lower edge of the bin below which `share` of them lie; nan for none."""
        if not self.num:
            return math.nan
        return float(np.searchsorted(self.counts.cumsum(), share * self.num)) / _NUM_BINS


@dataclass
class Statistics:
    """The counts. `groups` by what they are grouped by, then by value; lengths in tokens.

    `copies[i]` rows have an answer that occurs i + 1 times; the last number is of those with more, too.

    `mass` is the probability that the stored candidates of a response token have together; `variety` the share of a
    response's runs of four tokens that differ from each other, low where it goes round in circles. `samples` are rows
    chosen by a hash: a random choice that is the same every time.
    """

    groups: dict[str, dict[str, Group]] = field(default_factory=dict)
    prompt_lengths: Counter[int] = field(default_factory=Counter)
    response_lengths: Counter[int] = field(default_factory=Counter)
    num_rows: int = 0
    num_prompts: int = 0
    num_equal_answers: int = 0
    copies: list[int] = field(default_factory=list)
    topk: int = 0
    mass: Shares = field(default_factory=Shares)
    variety: Shares = field(default_factory=Shares)
    samples: list[dict[str, Any]] = field(default_factory=list)


def collect_statistics(files: Sequence[Path], num_samples: int = NUM_SAMPLES) -> Statistics:
    """Walk over the shards once, and over the stored candidates of some of them.

    Raises:
        ValueError: a shard is damaged; it is named.
    """
    found, prompts, answers = Statistics(), HashSet(), [HashSet() for _ in range(MAX_COPIES)]
    best: list[tuple[int, int, dict[str, Any]]] = []
    for table in shard_tables(files, _LIGHT):
        for row in table.to_pylist():
            _count(found, row, prompts, answers)
            rank = -_hash(f"sample:{row['prompt_id']}:{row['seed']}".encode())
            item = (rank, found.num_rows, row)
            if len(best) < num_samples:
                heapq.heappush(best, item)
            elif item > best[0]:
                heapq.heapreplace(best, item)
    found.num_prompts, found.num_equal_answers = len(prompts), found.num_rows - len(answers[0])
    found.copies = _copies([len(seen) for seen in answers], found.num_rows)
    found.samples = [row for _, _, row in sorted(best, reverse=True)]
    _add_mass(found, files)
    return found


def _count(found: Statistics, row: dict[str, Any], prompts: HashSet, answers: list[HashSet]) -> None:
    ids, is_cut = row["response_token_ids"], row["finish_reason"] == "length"
    found.num_rows += 1
    found.prompt_lengths[len(row["prompt_token_ids"])] += 1
    found.response_lengths[len(ids)] += 1
    sampling = f"temperature {row['temperature']:g}" + ("" if row["top_p"] >= 1 else f", top-p {row['top_p']:.3g}")
    labels = {
        "source": row["source"],
        "domain": row["domain"] or "(none)",
        "sampling": sampling,
        "finish reason": row["finish_reason"],
    }
    for kind, label in labels.items():
        found.groups.setdefault(kind, {}).setdefault(label, Group()).add(len(ids), is_cut)
    prompts.add(int(row["prompt_id"][:16], 16))
    answer = _hash(np.asarray(ids, np.int32).tobytes())
    any(seen.add(answer) for seen in answers)  # into the first table that does not have it
    num_runs = len(ids) - _NGRAM + 1
    if num_runs > 0:
        runs = set(zip(*(ids[start : start + num_runs] for start in range(_NGRAM)), strict=True))
        found.variety.add(np.array([len(runs) / num_runs]))


def _copies(num_seen: Sequence[int], num_rows: int) -> list[int]:
    """Rows by how often their answer occurs, from the numbers of answers that occur 1, 2, ... times or more."""
    exactly = [times * (a - b) for times, (a, b) in enumerate(pairwise(num_seen), start=1)]
    return [*exactly, num_rows - sum(exactly)]


def _add_mass(found: Statistics, files: Sequence[Path]) -> None:
    num_tokens = sum(length * count for length, count in found.response_lengths.items())
    stride = max(1, math.ceil(num_tokens / MAX_MASS_TOKENS))
    for table in shard_tables(files[::stride], ["topk_logprobs"]):
        for chunk in table.column("topk_logprobs").chunks:
            logprobs = _per_token(chunk)
            if logprobs is not None:
                found.topk = logprobs.shape[1]
                found.mass.add(np.exp(logprobs.astype(np.float64)).sum(axis=1))


def _per_token(chunk: pa.ListArray) -> Optional[npt.NDArray[np.float16]]:
    """Log-probabilities [N, K] of all response tokens of a chunk; None where none are stored."""
    tokens = chunk.flatten()
    values = tokens.flatten().to_numpy(zero_copy_only=False)
    if not len(values):
        return None
    return np.asarray(values, np.float16).reshape(len(tokens), -1)


def _hash(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big")
