"""From a stream of rows to shards: what is done is skipped, what another worker does is left to it, the rest is answered.

The stream is iterated anew in each pass, and must be the same each time. Only rows under way are held in memory.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Optional

from pipeline.corpus.answer_folder import AnswerFolder, row_key
from pipeline.corpus.backends.base import CorpusBackend, FinishedRow, Options
from pipeline.corpus.claims import Claims
from pipeline.corpus.hash_table import HashSet
from pipeline.corpus.progress import CorpusProgress
from pipeline.corpus.rows import Row

CLAIM_ROWS = 64
#: A shard is also written when its rows take this much memory.
SHARD_BYTES = 2**26
_TOKEN_BYTES, _CANDIDATE_BYTES = 32, 6  # a Python int in a list; int32 id and fp16 log-probability

OpenRows = Callable[[], Iterator[Row]]


def write_answers(
    open_rows: OpenRows,
    folder: Path,
    *,
    backend: CorpusBackend,
    options: Options,
    shard_rows: int,
    progress: CorpusProgress,
) -> AnswerFolder:
    """Have every row answered and written, by this worker or by others on the same folder.

    Args:
        open_rows: gives the stream of all rows, once per pass.
        folder: where the shards lie; `claims.lock` lies beside it.

    Raises:
        ValueError: a shard cannot be written, or the engine fails; finished rows are on disk by then.
    """
    answers = AnswerFolder(folder)
    claims = Claims(folder.parent / "claims.lock")
    try:
        left: Optional[set[int]] = None
        while True:
            a_pass = _Pass(answers, claims, shard_rows, progress, left)
            a_pass.run(open_rows(), backend, options)
            for block in a_pass.postponed:
                claims.wait(block)
            answers.refresh()
            left = set(a_pass.postponed) or None
            if left is None and not _drop_foreign(answers, open_rows, a_pass.num_rows):
                return answers
    finally:
        claims.close()


def _drop_foreign(answers: AnswerFolder, open_rows: OpenRows, num_rows: int) -> bool:
    """Remove shards with rows that are not in the stream; True where rows have to be made again."""
    if len(answers.done) == num_rows:
        return False
    wanted = HashSet()
    for row in open_rows():
        assert wanted.add(row_key(row.prompt_id, row.seed)), f"two rows have one identity: {row.row_id}"
    answers.drop_foreign(wanted)
    return True


class _Pass:
    """One walk over the stream. `blocks` are those that it is about, None for all.

    `_open` counts the rows of each claimed block that are not on disk yet.
    """

    def __init__(
        self,
        answers: AnswerFolder,
        claims: Claims,
        shard_rows: int,
        progress: CorpusProgress,
        blocks: Optional[set[int]],
    ) -> None:
        self.answers, self.claims, self.shard_rows, self.progress = answers, claims, shard_rows, progress
        self.blocks = blocks
        self.num_rows = 0
        self.postponed: list[int] = []
        self._open: dict[int, int] = {}
        self._block_of: dict[int, int] = {}
        self._buffer: list[FinishedRow] = []
        self._num_bytes = 0

    def run(self, rows: Iterator[Row], backend: CorpusBackend, options: Options) -> None:
        """Answer what nobody has; what has finished is written, whatever happens."""
        try:
            for finished in backend.generate(self._missing(rows), options):
                self._add(finished)
        except BaseException:
            with suppress(ValueError):  # the disk is full: the first error says more
                self._flush()
            raise
        self._flush()
        assert not self._open and not self._block_of, "a backend lost a row"

    def _missing(self, rows: Iterator[Row]) -> Iterator[Row]:
        for block, chunk in enumerate(_chunks(rows)):
            keys = [row_key(row.prompt_id, row.seed) for row in chunk]
            self.num_rows += len(chunk)
            is_other = self.blocks is not None and block not in self.blocks
            if is_other or self._is_done(keys) or not self._claim(block):
                continue
            if self.claims.others_may_have_written():
                self.answers.refresh()  # what the block's last holder wrote
            missing = [
                (row, key) for row, key in zip(chunk, keys, strict=True) if key not in self.answers.done
            ]
            self.progress.rows_done(len(chunk) - len(missing), reused=True)
            if not missing:
                self.claims.release(block)
                continue
            self._open[block] = len(missing)
            for row, key in missing:
                self._block_of[key] = block
                yield row

    def _is_done(self, keys: list[int]) -> bool:
        if not all(key in self.answers.done for key in keys):
            return False
        self.progress.rows_done(len(keys), reused=True)
        return True

    def _claim(self, block: int) -> bool:
        if not self.claims.take(block):
            self.postponed.append(block)
            return False
        return True

    def _add(self, finished: FinishedRow) -> None:
        self._buffer.append(finished)
        num_candidates = 0 if finished.topk_ids is None else finished.topk_ids.size
        self._num_bytes += len(finished.token_ids) * _TOKEN_BYTES + num_candidates * _CANDIDATE_BYTES
        if len(self._buffer) >= self.shard_rows or self._num_bytes >= SHARD_BYTES:
            self._flush()

    def _flush(self) -> None:
        if not self._buffer:
            return
        self.answers.write(self._buffer)
        self.progress.rows_done(len(self._buffer), reused=False)
        for finished in self._buffer:
            block = self._block_of.pop(row_key(finished.row.prompt_id, finished.row.seed))
            self._open[block] -= 1
            if not self._open[block]:
                del self._open[block]
                self.claims.release(block)
        self._buffer, self._num_bytes = [], 0


def _chunks(rows: Iterator[Row]) -> Iterator[list[Row]]:
    while chunk := list(islice(rows, CLAIM_ROWS)):
        yield chunk
