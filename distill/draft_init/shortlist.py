"""The ids that a draft's head is trimmed to, and how much of the text they cover."""

from collections.abc import Iterable, Sequence

import numpy as np
from datasets import Dataset


def frequent_token_ids(train_dataset: Dataset, num_ids: int, always_include: Iterable[int] = ()) -> list[int]:
    """The `num_ids` most frequent response tokens of the training rows, ascending (FR-Spec, Zhao et al. 2025).

    `always_include` (the special ids) are always among them; ties and ids that never occur go by the lowest id, which
    in a BPE vocabulary is the earliest merge.
    """
    always = set(always_include)
    if num_ids < max(1, len(always)):
        raise ValueError(f"draft.vocab_shortlist={num_ids}: must be at least the {max(1, len(always))} special ids")
    ranked = rank_token_ids(train_dataset, num_ids, always)
    return sorted(ranked[:num_ids].tolist())


def rank_token_ids(train_dataset: Dataset, vocab_size: int, always_include: Iterable[int] = ()) -> np.ndarray:
    """Ids in the order in which shortlists take them, int64: the first N are the shortlist of N.

    All ids below `vocab_size`, and any other that occurs or is always included.
    """
    always = np.array(sorted(set(always_include)), dtype=np.int64)
    ranked = np.argsort(-_count_response_tokens(train_dataset, vocab_size), kind="stable")
    return np.concatenate([always, ranked[~np.isin(ranked, always)]])


def shortlist_coverage(ranked: np.ndarray, held_out: Dataset, sizes: Sequence[int]) -> list[float]:
    """c(N) for each N of `sizes`: the share of the held-out response tokens that are among the first N of `ranked`.

    A draft with a head over them proposes no other token, so its acceptance rate is at most about c(N).
    """
    counts = _count_response_tokens(held_out, int(ranked.max()) + 1)
    covered = np.cumsum(counts[ranked])
    return [float(covered[min(size, len(ranked)) - 1] / max(counts.sum(), 1)) for size in sizes]


def _count_response_tokens(dataset: Dataset, num_ids: int) -> np.ndarray:
    """Occurrences by id, int64 [num_ids], longer if an id above occurs."""
    counts = np.zeros(num_ids, dtype=np.int64)
    column = dataset.select_columns(["response_token_ids"]).with_format("numpy")
    for batch in column.iter(batch_size=1024):
        for tokens in batch["response_token_ids"]:
            if len(tokens):
                new = np.bincount(np.asarray(tokens, dtype=np.int64), minlength=len(counts))
                new[: len(counts)] += counts
                counts = new
    return counts
