"""A look inside a corpus: `report.html` beside its shards, and the same figures in the tracker."""

import json
import os
from pathlib import Path
from typing import Any, Optional

from transformers import PreTrainedTokenizerBase

from pipeline.corpus.read import SHARDS
from pipeline.corpus.report_counts import collect_statistics
from pipeline.corpus.report_figures import corpus_figures
from pipeline.corpus.report_page import render_page
from pipeline.store import UNFINISHED
from pipeline.tracker import Tracker

REPORT_NAME = "report.html"


def write_corpus_report(
    folder: Path, tokenizer: PreTrainedTokenizerBase, tracker: Optional[Tracker] = None
) -> Path:
    """Write `report.html` into a corpus stage's folder, log it and its figures, and return its path.

    Raises:
        ValueError: the folder holds no shards, or cannot be written.
    """
    files = sorted((folder / SHARDS).glob("*.parquet"))
    if not files:
        raise ValueError(f"{str(folder)!r} holds no corpus shards: run the corpus stage, stages=[corpus]")
    found = collect_statistics(files)
    record = _record(folder)
    figures = corpus_figures(found)
    texts = [
        (tokenizer.decode(row["prompt_token_ids"]), tokenizer.decode(row["response_token_ids"]))
        for row in found.samples
    ]
    name = folder.name.removesuffix(UNFINISHED)  # the stage writes its report before it renames its folder
    title = f"Corpus {name}" if record else f"Corpus {name}, as far as it is"
    page = render_page(title, found, record, figures, texts)
    path = folder / REPORT_NAME
    temporary = path.with_name(f".{REPORT_NAME}.{os.getpid()}.tmp")
    try:
        temporary.write_text(page, encoding="utf-8", errors="replace")
        os.replace(temporary, path)
    except OSError as error:
        raise ValueError(f"{str(path)!r} cannot be written: {error.strerror or error}") from error
    if tracker is not None:
        tracker.log_text(page, REPORT_NAME)
        for name, figure in figures.items():
            tracker.log_figure(figure, f"{name}.png")
    return path


def _record(folder: Path) -> dict[str, Any]:
    """`corpus.json`, or nothing for a corpus that is not finished."""
    try:
        record: dict[str, Any] = json.loads((folder / "corpus.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    return record
