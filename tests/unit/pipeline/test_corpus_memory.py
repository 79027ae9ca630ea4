"""A prompts file streams through the stage: what is held grows by a few bytes a row, for the content hashes alone."""

from pathlib import Path

import pytest

from scripts.corpus_stream import Memory, Sample, row_seconds, stream


@pytest.mark.slow
def test_memory_stays_flat_over_a_long_prompts_file(tmp_path: Path) -> None:
    samples = stream(40_000, tmp_path, shard_rows=512)
    assert [sample.num_rows for sample in samples[:2]] == [0, 2000] and samples[-1].num_rows == 40_000
    assert Memory.of(samples).is_flat, "a row itself takes over a thousand bytes"


@pytest.mark.parametrize(("bytes_per_row", "is_flat"), [(90, True), (1000, False)])
def test_what_counts_as_flat(bytes_per_row: int, is_flat: bool) -> None:
    samples = [Sample(n, n * 1e-3, 10**8 + n * bytes_per_row) for n in range(0, 100_001, 5000)]
    assert Memory.of(samples).is_flat is is_flat


def test_rows_are_timed_by_quarters() -> None:
    samples = [Sample(n, n * 1e-3 + max(0, n - 750) * 1e-3, 0) for n in range(0, 1001, 50)]
    assert row_seconds(samples) == pytest.approx((1.25e-3, 1e-3, 2e-3))
