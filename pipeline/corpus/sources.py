"""Rows of a prompts file or dataset: JSON lines, Parquet, CSV, or whatever `datasets` loads. Read as a stream."""

import codecs
import csv
import gzip
import json
import sys
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Optional, TextIO, cast

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset, DatasetDict, IterableDataset, load_dataset, load_from_disk

from pipeline.corpus_schema import SourceConfig

COLUMNS = ("messages", "conversations", "prompt", "question", "instruction", "text", "input", "query", "content")
SYSTEM_COLUMNS = ("system", "system_prompt")
BAD_ROW = "bad_row"
_MAX_LOOKED_AT = 64
Row = dict[str, Any]


class BadRow(dict[str, Any]):
    """A row that could not be parsed; counted, never used."""


@dataclass(frozen=True)
class Record:
    """What one row asks: a text or a list of messages (or a `BadRow`), with what stands beside it."""

    value: Any
    domain: str = ""
    system: Optional[str] = None
    tools: Any = None


def read_records(source: SourceConfig) -> Iterator[Record]:
    """The rows of a source, lazily. The file is opened and its first readable rows looked at in the call itself.

    Raises:
        ValueError: no such file or dataset, an empty one, or no such column (the available ones are named).
    """
    assert source.prompts is not None
    if not source.prompts.strip():
        raise ValueError(
            "corpus.prompts is empty: give a file (jsonl, parquet, csv) or a dataset, or null for invented questions"
        )
    rows = read_rows(source.prompts, source.split, subset=source.subset)
    num_unreadable, looked_at = _look(rows, source)
    if not looked_at:
        raise ValueError(
            f"corpus.prompts={source.prompts!r} has no rows that can be read: give a file or dataset with at least one"
        )
    available = list(dict.fromkeys(name for row in looked_at for name in row))
    column = _column(source.prompts, available, source.column)
    if source.domain_column is not None and source.domain_column not in available:
        raise ValueError(
            f"corpus.domain_column={source.domain_column!r}: {source.prompts!r} has no such column; it has {available}"
        )
    return _records(chain([BadRow()] * num_unreadable, looked_at, rows), column, source)


def _look(rows: Iterator[Row], source: SourceConfig) -> tuple[int, list[Row]]:
    """Reads until the columns are found that the source has to have: one broken row must not hide them.

    Returns the number of unreadable rows before the first readable one, and the rows from there on.
    """
    num_unreadable = 0
    looked_at: list[Row] = []
    for row in rows:
        if isinstance(row, BadRow) and not looked_at:
            num_unreadable += 1
            continue
        looked_at.append(row)
        has_column = source.column in row if source.column is not None else any(name in row for name in COLUMNS)
        if len(looked_at) == _MAX_LOOKED_AT or (has_column and (source.domain_column is None or source.domain_column in row)):
            break
    return num_unreadable, looked_at


def _records(rows: Iterable[Row], column: str, source: SourceConfig) -> Iterator[Record]:
    for row in rows:
        yield Record(row) if isinstance(row, BadRow) else _record(row, column, source)


def question_of(row: Row, column: str) -> Any:
    """What a row asks in this column; Alpaca's two fields are one question."""
    value = row.get(column)
    if column == "instruction" and isinstance(row.get("input"), str) and row["input"].strip():
        value = f"{value}\n\n{row['input']}"
    return value


def printable(value: Any) -> str:
    """A name or domain: what is no text in the file's encoding cannot be written to a page or a result."""
    return str(value).encode(errors="replace").decode()


def _record(row: Row, column: str, source: SourceConfig) -> Record:
    value, domain = question_of(row, column), None
    if source.domain_column is not None:
        domain = row.get(source.domain_column)
    system = next((row[name] for name in SYSTEM_COLUMNS if isinstance(row.get(name), str) and name != column), None)
    domain = source.domain if domain is None else printable(domain)
    return Record(value, domain, system, row.get("tools"))


def _column(prompts: str, available: list[str], column: Optional[str]) -> str:
    if column is not None:
        if column not in available:
            raise ValueError(
                f"corpus.prompts_column={column!r}: {prompts!r} has no such column; it has {available}"
            )
        return column
    for name in COLUMNS:
        if name in available:
            return name
    raise ValueError(
        f"corpus.prompts={prompts!r} has none of the columns {list(COLUMNS)}; it has {available}: name one as corpus.prompts_column"
    )


def read_rows(
    prompts: str, split: str, *, subset: Optional[str] = None, field: str = "corpus.prompts"
) -> Iterator[Row]:
    """All rows of a file or dataset, with all their columns; `BadRow` for an unreadable one.

    Raises:
        ValueError: no such file or dataset; `field` is the setting that named it.
    """
    path = Path(prompts)
    kind = Path(path.name.lower().removesuffix(".gz")).suffix
    if path.is_file():
        readers = {".jsonl": _jsonl, ".json": _json, ".parquet": _parquet, ".csv": _csv}
        if kind not in readers:
            raise ValueError(
                f"{field}={prompts!r}: unknown kind of file; use one of {sorted(readers)} or a dataset"
            )
        if split != "train" or subset is not None:
            raise ValueError(
                f"{field}={prompts!r} is one file: it has no split={split!r} and no subset={subset!r}, which only datasets have"
            )
        return _readable(readers[kind](path), prompts, field, (OSError, EOFError, zlib.error))
    if kind in (".jsonl", ".json", ".parquet", ".csv"):
        raise ValueError(f"{field}={prompts!r}: no such file")
    # `datasets` raises a score of types for a row that it cannot read.
    return _readable(iter(_dataset(prompts, split, subset)), prompts, field, (Exception,))


def _readable(
    rows: Iterator[Row], prompts: str, field: str, failures: tuple[type[Exception], ...]
) -> Iterator[Row]:
    try:
        yield from rows
    except failures as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"{field}={prompts!r}: cannot be read to its end ({reason}): mend or replace the file that it stands in"
        ) from error


def _text(path: Path, newline: Optional[str] = None) -> TextIO:
    """A file as text, unpacked when it ends in .gz. What is no text becomes lone surrogates, by which its row is known."""
    opened = gzip.open if path.suffix.lower() == ".gz" else open
    with opened(path, "rb") as stream:
        start = stream.read(2)
    if start in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):  # as PowerShell's `>` writes it
        return cast(TextIO, opened(path, "rt", encoding="utf-16", errors="replace", newline=newline))
    return cast(TextIO, opened(path, "rt", encoding="utf-8-sig", errors="surrogateescape", newline=newline))


def _jsonl(path: Path) -> Iterator[Row]:
    with _text(path) as stream:
        for line in stream:
            if line.strip():
                yield _parsed(line)


def _parsed(line: str) -> Row:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):  # also numbers of thousands of digits, and thousands of brackets
        return BadRow()
    return value if isinstance(value, dict) else BadRow()


def _json(path: Path) -> Iterator[Row]:
    """One JSON array, which is read as a whole, or JSON lines under another name."""
    with _text(path) as stream:
        start = stream.read(1024)
        if not start.lstrip().startswith("["):
            yield from _jsonl(path)
            return
        try:
            values = json.loads(start + stream.read())
        except (ValueError, RecursionError) as error:
            raise ValueError(f"corpus.prompts={str(path)!r} is not valid JSON: {error}") from error
    for value in values:
        yield value if isinstance(value, dict) else BadRow()


def _parquet(path: Path) -> Iterator[Row]:
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=256):
                yield from batch.to_pylist()
    except (OSError, pa.ArrowInvalid) as error:
        raise ValueError(f"corpus.prompts={str(path)!r} is not a readable Parquet file: {error}") from error


def _csv(path: Path) -> Iterator[Row]:
    csv.field_size_limit(sys.maxsize)  # documents are longer than the default of 131072 characters
    with _text(path, newline="") as stream:
        reader = csv.DictReader(line.replace("\0", "") for line in stream)
        while True:
            try:
                row = next(reader)
            except StopIteration:
                return
            except csv.Error:
                row = BadRow()
            yield row


def _dataset(prompts: str, split: str, subset: Optional[str]) -> Dataset | IterableDataset:
    """A dataset on disk is mapped into memory; one of the hub, or a folder of files, is streamed."""
    place = Path(prompts)
    try:
        if (place / "state.json").is_file() or (place / "dataset_dict.json").is_file():
            loaded = load_from_disk(prompts)
            if not isinstance(loaded, DatasetDict):
                return loaded
        else:
            loaded = load_dataset(prompts, subset, streaming=True)
    except Exception as error:
        # `datasets` and the hub client raise a score of types here; each means that the rows cannot be had.
        raise ValueError(
            f"corpus.prompts={prompts!r}: neither a file nor a dataset that can be loaded: {error}"
        ) from error
    if split not in loaded:
        raise ValueError(f"corpus.prompts_split={split!r}: {prompts!r} has the splits {sorted(loaded)}")
    return loaded[split]
