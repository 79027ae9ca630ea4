"""The shards of the answers: each is named after the rows in it, so that no two writers ever choose the same name."""

import hashlib
import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Optional

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.corpus.backends.base import FinishedRow
from pipeline.corpus.hash_table import HashSet
from pipeline.corpus.shards import ANSWER_SCHEMA, nested_topk, write_message, write_table

log = logging.getLogger(__name__)

_FAILED_KEY = b"draftsmith.failed"


class Failed(NamedTuple):
    """A row that came to nothing, as it is kept in its shard's metadata. `row` is its place in the source."""

    prompt_id: str
    seed: int
    reason: str
    row: str


def row_key(prompt_id: str, seed: int) -> int:
    """64 bits that tell the rows of a corpus apart: a prompt's samples have different seeds."""
    return int.from_bytes(hashlib.blake2b(f"{prompt_id}:{seed}".encode(), digest_size=8).digest(), "big")


class AnswerFolder:
    """The answer shards of one corpus, and which rows lie in them.

    Several processes may write into one folder; `refresh` sees what the others have finished.
    """

    def __init__(self, folder: Path) -> None:
        """Open the folder and read what is there; a shard that is damaged or repeats a row is removed.

        Raises:
            ValueError: the folder cannot be made.
        """
        self.folder = folder
        try:
            folder.mkdir(exist_ok=True)  # in the work folder: a finished one must not come back
        except OSError as error:
            raise ValueError(write_message(folder, error)) from error
        self.done = HashSet()
        self._known: set[str] = set()
        self.refresh()

    def files(self) -> list[Path]:
        """All shards."""
        return sorted(self.folder.glob("*.parquet"))

    def refresh(self) -> None:
        """Take in the shards that have come since the last look."""
        for file in self.files():
            if file.name in self._known:
                continue
            keys = shard_keys(file)
            if keys is None or any(key in self.done for key in keys):
                log.warning(
                    "%s is %s: its rows are made again", file, "damaged" if keys is None else "doubled"
                )
                file.unlink(missing_ok=True)
                continue
            self._remember(file.name, keys)

    def write(self, rows: Sequence[FinishedRow]) -> None:
        """Write a shard with these rows, failed ones included; when this returns it survives a crash.

        Raises:
            ValueError: it cannot be written; the path is named.
        """
        keys = [row_key(finished.row.prompt_id, finished.row.seed) for finished in rows]
        digest = hashlib.sha256(b"".join(key.to_bytes(8, "big") for key in sorted(keys))).hexdigest()
        path = self.folder / f"{digest[:16]}.parquet"
        write_table(path, answer_table(rows))
        self._remember(path.name, keys)

    def _remember(self, name: str, keys: Sequence[int]) -> None:
        self._known.add(name)
        for key in keys:
            self.done.add(key)

    def drop_foreign(self, wanted: HashSet) -> None:
        """Remove the shards that hold rows of another corpus."""
        foreign = [file for file in self.files() if not all(key in wanted for key in shard_keys(file) or ())]
        for file in foreign:
            log.warning("%s holds rows of another corpus and is removed", file)
            file.unlink()
        self.done, self._known = HashSet(), set()
        self.refresh()

    def remove_leftovers(self) -> None:
        """Delete what killed writers left half written; nobody may be writing."""
        for leftover in self.folder.glob("*.tmp"):
            leftover.unlink(missing_ok=True)


def answer_table(rows: Sequence[FinishedRow]) -> pa.Table:
    """Rows as a table; failed ones go into its metadata."""
    good = [finished for finished in rows if finished.failure is None]
    failed = [
        Failed(f.row.prompt_id, f.row.seed, f.failure, f.row.row) for f in rows if f.failure is not None
    ]
    columns = {
        "prompt_id": [f.row.prompt_id for f in good],
        "source": [f.row.source for f in good],
        "domain": [f.row.domain for f in good],
        "prompt_token_ids": [f.row.prompt_token_ids for f in good],
        "response_token_ids": [f.token_ids for f in good],
        "finish_reason": [f.finish_reason for f in good],
        "temperature": [f.row.temperature for f in good],
        "top_p": [f.row.top_p for f in good],
        "seed": [f.row.seed for f in good],
    }
    arrays = [pa.array(values, type=ANSWER_SCHEMA.field(name).type) for name, values in columns.items()]
    # Without stored candidates each response token still has its (empty) list.
    lengths = [len(f.token_ids) for f in good]
    ids = [f.topk_ids for f in good if f.topk_ids is not None]
    logprobs = [f.topk_logprobs for f in good if f.topk_logprobs is not None]
    assert len(ids) == len(logprobs) and len(ids) in (0, len(good)), (
        "a shard has candidates for all rows or for none"
    )
    arrays += [nested_topk(ids, pa.int32(), lengths), nested_topk(logprobs, pa.float16(), lengths)]
    metadata = {_FAILED_KEY: json.dumps(failed).encode()}
    return pa.Table.from_arrays(arrays, schema=ANSWER_SCHEMA.with_metadata(metadata))


def failed_rows(schema: pa.Schema) -> list[Failed]:
    """The rows of a shard that came to nothing."""
    return [Failed(*values) for values in json.loads((schema.metadata or {}).get(_FAILED_KEY, b"[]"))]


def shard_keys(file: Path) -> Optional[list[int]]:
    """The keys of all rows of a shard, failed ones included; None where it is damaged or has another schema."""
    try:
        if not pq.read_schema(file).equals(ANSWER_SCHEMA):
            return None
        table = pq.read_table(file, columns=["prompt_id", "seed"], partitioning=None)
    except (OSError, pa.ArrowInvalid):
        return None
    ids = zip(table.column("prompt_id").to_pylist(), table.column("seed").to_pylist(), strict=True)
    failed = failed_rows(table.schema)
    return [row_key(*one) for one in ids] + [row_key(one.prompt_id, one.seed) for one in failed]


def shard_tables(files: Sequence[Path], columns: Optional[list[str]] = None) -> Iterator[pa.Table]:
    """The shards one by one.

    Raises:
        ValueError: one is damaged; it is named.
    """
    for file in files:
        try:
            table = pq.read_table(file, columns=columns, partitioning=None)
        except (OSError, pa.ArrowInvalid) as error:
            raise ValueError(f"{str(file)!r} is damaged: delete its stage folder and run again") from error
        if columns is None:
            table = _with_later_columns(table)
            if not table.schema.equals(ANSWER_SCHEMA):
                raise ValueError(
                    f"{str(file)!r} has other columns than a corpus: delete its stage folder and run again"
                )
        yield table


def _with_later_columns(table: pa.Table) -> pa.Table:
    """Corpora of version 0.1 had neither domains nor nuclei."""
    for name, value in (("domain", ""), ("top_p", 1.0)):
        if name not in table.column_names:
            field = ANSWER_SCHEMA.field(name)
            values = pa.array([value] * len(table), type=field.type)
            table = table.add_column(ANSWER_SCHEMA.get_field_index(name), field, values)
    return table
