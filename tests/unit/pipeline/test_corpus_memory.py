"""A prompts file streams through the stage: what is held grows by a few bytes a row, for the content hashes alone."""

from pathlib import Path

import pytest

from scripts.corpus_stream import stream

MAX_BYTES_PER_ROW = 150  # two tables of hashes; a row itself takes over a thousand


@pytest.mark.slow
def test_memory_stays_flat_over_a_long_prompts_file(tmp_path: Path) -> None:
    samples = stream(40_000, tmp_path, shard_rows=512).samples
    early, late = samples[len(samples) // 4], samples[-1]
    growth = (late.resident_bytes - early.resident_bytes) / (late.num_rows - early.num_rows)
    assert growth < MAX_BYTES_PER_ROW
