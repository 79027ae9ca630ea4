"""The corpus stage: prompts, then the target's answers, then the accounting."""

import hashlib
import logging
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Optional

from rich.console import Console
from transformers import PreTrainedTokenizerBase

from pipeline.context import StageContext
from pipeline.corpus.accounting import Accounting
from pipeline.corpus.answer_folder import AnswerFolder, shard_tables
from pipeline.corpus.answers import write_answers
from pipeline.corpus.backends import open_backend
from pipeline.corpus.backends.base import CorpusBackend, Options, common_prefix
from pipeline.corpus.chat import stop_ids
from pipeline.corpus.claims import only_one
from pipeline.corpus.mixture import PromptStream, check_prompts, sources_of
from pipeline.corpus.policy import plan_rows
from pipeline.corpus.progress import CorpusProgress
from pipeline.corpus.prompts import Admission, Prompt
from pipeline.corpus.questions import QuestionMaker
from pipeline.corpus.read import SHARDS
from pipeline.corpus.report import write_corpus_report
from pipeline.corpus.rows import Row
from pipeline.corpus.target_info import TargetInfo, check_sizes, load_target_info
from pipeline.models import load_tokenizer
from pipeline.store import write_json

log = logging.getLogger(__name__)

QUESTIONS = "questions"
#: What the first rows of a corpus have in common is taken for what all have in common.
PREFIX_ROWS = 64


def run_corpus(context: StageContext) -> dict[str, object]:
    """Write `questions/`, `shards/` and `corpus.json` into the work folder; return the figures.

    A folder that a killed run left is taken up: what is written is kept, and the result is the one that an undisturbed
    run gives.

    Raises:
        ValueError: prompts that cannot be used, lengths beyond the target's context, a folder that cannot be written,
            an engine that fails.
    """
    folder = context.work_dir
    stream = RowSource(context)
    with CorpusProgress() as progress:
        answers, name = generate_corpus(context, stream, progress)
        speed = progress.tokens_per_second if progress.num_tokens else None
    answers.remove_leftovers()
    (folder / "claims.lock").unlink(missing_ok=True)
    accounting = stream.accounting
    accounting.count_shards(answers.files())
    record = {
        **accounting.to_dict(),
        **stream.described,
        "backend": name,
        "target_revision": context.target.revision,
    }
    try:
        write_json(folder / "corpus.json", record)
    except OSError as error:
        raise ValueError(
            f"{str(folder / 'corpus.json')!r} cannot be written: {error.strerror or error}"
        ) from error
    if accounting.num_written == 0:
        raise ValueError(
            f"The target gave no answer that could be kept; failed rows: {dict(accounting.failed)}"
        )
    _warn_of_failures(accounting)
    digest = corpus_digest(answers.files(), context.target.revision)
    context.tracker.log_corpus(folder, digest=digest, num_rows=accounting.num_written)
    write_corpus_report(folder, stream.tokenizer, context.tracker)
    return _figures(accounting, speed)


def generate_corpus(
    context: StageContext,
    stream: "RowSource",
    progress: CorpusProgress,
    *,
    backend: Optional[CorpusBackend] = None,
) -> tuple[AnswerFolder, str]:
    """Invent the questions, where the sources want some, and have all rows answered; returns the engine's name too.

    Several processes may do this in one work folder: each row is answered by one of them. `backend` is the engine of the
    configuration unless one is given; it is closed at the end.
    """
    corpus = context.config.corpus
    backend = backend or open_backend(context, stream.target)
    try:
        stream.make_questions(backend, progress)
        num_rows = None if corpus.num_prompts is None else corpus.num_prompts * corpus.samples_per_prompt
        progress.start("answers", num_rows=num_rows, max_tokens_per_row=corpus.max_new_tokens)
        answers = write_answers(
            lambda: stream.rows(backend),
            context.work_dir / SHARDS,
            backend=backend,
            options=Options(
                stop_ids(stream.target, stream.tokenizer),
                topk=corpus.topk,
                shared_prefix=common_prefix(islice(stream.rows(backend), PREFIX_ROWS)),
                on_tokens=progress.tokens,
            ),
            shard_rows=corpus.shard_rows,
            progress=progress,
        )
    finally:
        backend.close()
    return answers, backend.name


class RowSource:
    """All rows of a corpus as a stream that can be had again and again; `accounting` is that of the latest one."""

    def __init__(self, context: StageContext) -> None:
        """Open the tokenizer and look at the sources.

        Raises:
            ValueError: as `check_prompts` and `check_sizes`.
        """
        self.config, self.folder = context.config, context.work_dir / QUESTIONS
        self.tokenizer: PreTrainedTokenizerBase = load_tokenizer(
            context.target.path, context.target.trust_remote_code
        )
        check_prompts(self.config, self.tokenizer)
        self.target: TargetInfo = load_target_info(context.target.path, context.target.trust_remote_code)
        check_sizes(self.config, self.target)
        self.accounting = Accounting()
        self.described: dict[str, object] = {}

    def make_questions(self, backend: CorpusBackend, progress: CorpusProgress) -> None:
        """Put the target's own questions on disk, so that `rows` finds them there and the engine is free for answers."""
        if all(source.prompts is not None for source in sources_of(self.config.corpus)):
            return
        with only_one(self.folder.parent / "questions.lock"):
            for _ in self._prompts(backend, Accounting(), progress):
                pass
        (self.folder.parent / "questions.lock").unlink(missing_ok=True)

    def rows(self, backend: CorpusBackend) -> Iterator[Row]:
        """Every row, with an accounting of its own."""
        self.accounting = Accounting()
        prompts = self._prompts(backend, self.accounting, CorpusProgress(Console(quiet=True)))
        for row in plan_rows(prompts, self.config.corpus):
            # The prompt itself was counted as it was read.
            self.accounting.num_requested += row.sample_index > 0
            yield row
        self.described = prompts.describe()

    def _prompts(
        self, backend: CorpusBackend, accounting: Accounting, progress: CorpusProgress
    ) -> PromptStream:
        def ask(num_wanted: int, admission: Admission, domain: str) -> Iterator[Prompt]:
            maker = QuestionMaker(self.config.corpus, self.tokenizer, self.target, backend, domain=domain)
            return maker.prompts(
                self.folder, accounting, progress, num_wanted=num_wanted, admission=admission
            )

        return PromptStream(self.config, self.tokenizer, accounting, ask)


def corpus_digest(files: list[Path], target_revision: str) -> str:
    """A hash of what decides the rows, in whatever order they lie: who answered which prompts, and how they were sampled."""
    columns = ["prompt_id", "temperature", "top_p", "seed"]
    total = 0
    for table in shard_tables(files, columns):
        for values in zip(*(table.column(name).to_pylist() for name in columns), strict=True):
            total += int.from_bytes(hashlib.sha256(repr(values).encode()).digest(), "big")
    return hashlib.sha256(f"{target_revision}:{total % 2**256}".encode()).hexdigest()


def _warn_of_failures(accounting: Accounting) -> None:
    """Say what the next stages will not miss: a corpus of few answers trains a draft all the same."""
    if accounting.failed:
        log.warning(
            "%d of the corpus's %d rows failed: %s; corpus.json names some of each",
            accounting.failed.total(), accounting.num_requested, dict(accounting.failed.most_common()),
        )  # fmt: skip


def _figures(accounting: Accounting, tokens_per_second: float | None) -> dict[str, object]:
    figures: dict[str, object] = {
        "num_requested": accounting.num_requested,
        "num_written": accounting.num_written,
        "num_skipped": accounting.skipped.total(),
        "num_failed": accounting.failed.total(),
        "num_stop": accounting.finish_reason["stop"],
        "num_truncated": accounting.finish_reason["length"],
        "num_response_tokens": accounting.num_response_tokens,
    }
    if tokens_per_second is not None:
        figures["tokens_per_second"] = round(tokens_per_second, 1)
    return figures
