"""Parquet shards, each written as a whole or not at all: temporary name, fsync, rename."""

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Optional

import pyarrow as pa
import pyarrow.parquet as pq

ANSWER_SCHEMA = pa.schema(
    [
        ("prompt_id", pa.string()),
        ("source", pa.string()),
        ("domain", pa.string()),
        ("prompt_token_ids", pa.list_(pa.int32())),
        ("response_token_ids", pa.list_(pa.int32())),
        ("finish_reason", pa.string()),
        ("temperature", pa.float32()),
        ("top_p", pa.float32()),
        ("seed", pa.int64()),
        ("topk_ids", pa.list_(pa.list_(pa.int32()))),
        ("topk_logprobs", pa.list_(pa.list_(pa.float16()))),
    ]
)
QUESTION_SCHEMA = pa.schema(
    [("slot", pa.int64()), ("text", pa.string()), ("num_tokens", pa.int32()), ("finish_reason", pa.string())]
)


class ShardFolder:
    """Numbered shards of one schema. A shard that can be read is finished; anything else there is ignored and replaced."""

    def __init__(self, folder: Path, schema: pa.Schema) -> None:
        self.folder, self.schema = folder, schema
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for leftover in folder.glob("*.tmp"):
                leftover.unlink()
        except OSError as error:
            raise ValueError(write_message(folder, error)) from error

    def path(self, index: int) -> Path:
        """Where shard `index` lies."""
        return self.folder / f"{index:06d}.parquet"

    def read(self, index: int) -> Optional[pa.Table]:
        """The shard's rows, or None where it is not finished or is damaged."""
        try:
            table = pq.read_table(self.path(index), partitioning=None)
        except (OSError, pa.ArrowInvalid):
            return None
        return table if table.schema.equals(self.schema) else None

    def write(self, index: int, rows: Sequence[dict[str, Any]]) -> None:
        """Write shard `index`; when this returns it survives a crash of the machine.

        Raises:
            ValueError: the folder is missing or cannot be written, or the disk is full; the path is named.
        """
        columns = [
            pa.array([row[name] for row in rows], type=self.schema.field(name).type)
            for name in self.schema.names
        ]
        write_table(self.path(index), pa.Table.from_arrays(columns, schema=self.schema))


def write_table(path: Path, table: pa.Table) -> None:
    """Write a Parquet file as a whole or not at all; when this returns it survives a crash of the machine.

    Raises:
        ValueError: the folder is missing or cannot be written, or the disk is full; the path is named.
    """
    temporary = path.with_name(f"{path.stem}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as stream:
            pq.write_table(table, stream, compression="zstd")
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
        _sync_folder(path.parent)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)  # on a full disk it would stand in the way of the next attempt
        raise ValueError(write_message(path, error)) from error


def nested_topk(values: Sequence[Any], value_type: pa.DataType, num_rows_each: Sequence[int]) -> pa.Array:
    """Arrays [N_i, K] as one list<list> column, without a Python object per number."""
    width = values[0].shape[1] if values else 0
    flat = (
        pa.array([], type=value_type)
        if not values
        else pa.concat_arrays([pa.array(x.reshape(-1), type=value_type) for x in values])
    )
    inner_offsets = pa.array([i * width for i in range(sum(num_rows_each) + 1)], type=pa.int32())
    inner = pa.ListArray.from_arrays(inner_offsets, flat)
    outer = [0]
    for num in num_rows_each:
        outer.append(outer[-1] + num)
    return pa.ListArray.from_arrays(pa.array(outer, type=pa.int32()), inner)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_message(path: Path, error: OSError) -> str:
    return (
        f"The corpus cannot be written to {str(path)!r}: {error.strerror or error}. Free disk space or set artifacts_dir to a "
        "folder that can be written, and run again: finished shards are kept."
    )
