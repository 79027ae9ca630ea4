"""Rows of a prompts file or dataset: JSON lines, Parquet, CSV, or whatever `datasets` loads. Read as a stream."""

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Optional

import pyarrow.parquet as pq
from datasets import Dataset, DatasetDict, load_dataset, load_from_disk

COLUMNS = (
    "messages",
    "conversations",
    "prompt",
    "question",
    "instruction",
    "text",
    "input",
    "query",
    "content",
)
BAD_JSON = "bad_json"
Row = dict[str, Any]


class BadRow(dict[str, Any]):
    """A row that could not be parsed; counted, never used."""


def read_prompts(prompts: str, column: Optional[str], split: str) -> Iterator[Any]:
    """The values of the prompts column (text, or a list of messages), one per row; `BadRow` for an unreadable one.

    Raises:
        ValueError: no such file or dataset, an empty one, or no such column (the available ones are named).
    """
    if not prompts.strip():
        raise ValueError(
            "corpus.prompts is empty: give a file (jsonl, parquet, csv) or a dataset, or null for invented questions"
        )
    rows = read_rows(prompts, split)
    first: Optional[Row] = None
    unreadable: list[Row] = []
    for row in rows:
        if isinstance(row, BadRow):
            unreadable.append(row)
            continue
        first = row
        break
    if first is None:
        raise ValueError(
            f"corpus.prompts={prompts!r} has no rows that can be read: give a file or dataset with at least one"
        )
    chosen = _column(prompts, list(first), column)
    return _values(unreadable, first, rows, chosen)


def _values(unreadable: list[Row], first: Row, rows: Iterator[Row], column: str) -> Iterator[Any]:
    yield from unreadable
    yield first.get(column)
    for row in rows:
        yield row if isinstance(row, BadRow) else row.get(column)


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


def read_rows(prompts: str, split: str, *, field: str = "corpus.prompts") -> Iterator[Row]:
    """All rows of a file or dataset, with all their columns; `BadRow` for an unreadable one.

    Raises:
        ValueError: no such file or dataset; `field` is the setting that named it.
    """
    path = Path(prompts)
    if path.is_file():
        readers = {".jsonl": _jsonl, ".json": _json, ".parquet": _parquet, ".csv": _csv}
        if path.suffix not in readers:
            raise ValueError(
                f"{field}={prompts!r}: unknown kind of file; use one of {sorted(readers)} or a dataset"
            )
        return readers[path.suffix](path)
    if path.suffix in (".jsonl", ".json", ".parquet", ".csv"):
        raise ValueError(f"{field}={prompts!r}: no such file")
    return iter(_dataset(prompts, split))


def _jsonl(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8", errors="replace") as stream:
        for line in stream:
            if line.strip():
                yield _parsed(line)


def _parsed(line: str) -> Row:
    try:
        value = json.loads(line)
    except json.JSONDecodeError:
        return BadRow()
    return value if isinstance(value, dict) else BadRow()


def _json(path: Path) -> Iterator[Row]:
    text = path.read_text(encoding="utf-8", errors="replace")
    if not text.lstrip().startswith("["):
        yield from _jsonl(path)
        return
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"corpus.prompts={str(path)!r} is not valid JSON: {error}") from error
    for value in values:
        yield value if isinstance(value, dict) else BadRow()


def _parquet(path: Path) -> Iterator[Row]:
    try:
        file = pq.ParquetFile(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"corpus.prompts={str(path)!r} is not a readable Parquet file: {error}") from error
    for batch in file.iter_batches(batch_size=1024):
        yield from batch.to_pylist()


def _csv(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as stream:
        yield from csv.DictReader(stream)


def _dataset(prompts: str, split: str) -> Dataset:
    try:
        if Path(prompts).is_dir() and (
            (Path(prompts) / "state.json").is_file() or (Path(prompts) / "dataset_dict.json").is_file()
        ):
            loaded = load_from_disk(prompts)
            if not isinstance(loaded, DatasetDict):
                return loaded
        else:
            loaded = load_dataset(prompts)
    except Exception as error:
        # `datasets` and the hub client raise a score of types here; each means that the rows cannot be had.
        raise ValueError(
            f"corpus.prompts={prompts!r}: neither a file nor a dataset that can be loaded: {error}"
        ) from error
    if split not in loaded:
        raise ValueError(f"corpus.prompts_split={split!r}: {prompts!r} has the splits {sorted(loaded)}")
    return loaded[split]
