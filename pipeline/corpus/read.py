"""Reading a corpus back, and its split by content."""

import hashlib
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset

from pipeline.compat import read_json
from pipeline.corpus.answer_folder import shard_tables

SHARDS = "shards"
#: Larger ones are read through an index instead; a list column holds 2^31 items at most.
_MAX_COPIED_BYTES = 2**30


def read_corpus(folder: Path) -> Dataset:
    """All rows of a finished corpus stage folder, ordered by `prompt_id` and `seed`; columns as in `ANSWER_SCHEMA`.

    Which shard a row lies in depends on when it finished; its place here does not.

    Raises:
        ValueError: the folder has no shards, or one of them is damaged or gone.
    """
    files = sorted((Path(folder) / SHARDS).glob("*.parquet"))
    if not files:
        raise ValueError(f"{str(folder)!r} holds no corpus shards: run the corpus stage, stages=[corpus]")
    table = pa.concat_tables([one.replace_schema_metadata(None) for one in shard_tables(files)])
    _require_all(Path(folder), len(table))
    order = pc.sort_indices(table, sort_keys=[("prompt_id", "ascending"), ("seed", "ascending")])
    if table.nbytes > _MAX_COPIED_BYTES:
        return Dataset(table).select(order.to_numpy())
    return Dataset(table.take(order))


def _require_all(folder: Path, num_rows: int) -> None:
    """A shard that is gone would be missed by nobody; `corpus.json` is written when all rows are."""
    num_written = read_json(folder / "corpus.json").get("written", num_rows)
    if num_written != num_rows:
        raise ValueError(
            f"{str(folder)!r} holds {num_rows} of the {num_written} rows that were written: delete this stage folder and run again"
        )


def split_corpus(
    dataset: Dataset, held_out_fraction: float, *, salt: str = "held_out"
) -> tuple[Dataset, Dataset]:
    """`(train, held_out)`: exact complements decided by each row's `prompt_id` alone.

    Rows of one prompt are on one side, and adding rows moves none. Another `salt` gives an independent split.
    """
    if not 0 < held_out_fraction < 1:
        raise ValueError(f"corpus.held_out_fraction={held_out_fraction}: must lie between 0 and 1")
    sides = [is_held_out(prompt_id, held_out_fraction, salt) for prompt_id in dataset["prompt_id"]]
    train = [index for index, held_out in enumerate(sides) if not held_out]
    held_out = [index for index, held_out in enumerate(sides) if held_out]
    return dataset.select(train), dataset.select(held_out)


def is_held_out(prompt_id: str, fraction: float, salt: str) -> bool:
    """The first 64 bits of sha256(salt, prompt_id), as a number in [0, 1), against the fraction."""
    digest = hashlib.sha256(f"{salt}:{prompt_id}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64 < fraction
