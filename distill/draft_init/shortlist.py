"""The ids that a draft's head is trimmed to."""

from collections.abc import Iterable

import numpy as np
from datasets import Dataset


def frequent_token_ids(train_dataset: Dataset, num_ids: int, always_include: Iterable[int] = ()) -> list[int]:
    """The `num_ids` most frequent response tokens of the training rows, ascending (FR-Spec, Zhao et al. 2025).

    `always_include` (the special ids) are always among them; ties and ids that never occur go by the lowest id, which
    in a BPE vocabulary is the earliest merge.
    """
    always = sorted(set(always_include))
    if num_ids < max(1, len(always)):
        raise ValueError(f"draft.vocab_shortlist={num_ids}: must be at least the {max(1, len(always))} special ids")
    counts = np.zeros(num_ids, dtype=np.int64)
    column = train_dataset.select_columns(["response_token_ids"]).with_format("numpy")
    for batch in column.iter(batch_size=1024):
        for tokens in batch["response_token_ids"]:
            if len(tokens):
                new = np.bincount(np.asarray(tokens, dtype=np.int64), minlength=len(counts))
                new[: len(counts)] += counts
                counts = new
    ranked = np.argsort(-counts, kind="stable").tolist()
    chosen = set(always)
    for token_id in ranked:
        if len(chosen) == num_ids:
            break
        chosen.add(token_id)
    return sorted(chosen)
