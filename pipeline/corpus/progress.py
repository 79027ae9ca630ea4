"""Progress of the corpus stage: a bar with tokens per second and time left, or plain lines where there is no terminal."""

import time
from types import TracebackType
from typing import Optional

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

_LINE_EVERY_S = 15.0


class CorpusProgress:
    """Counts rows and tokens of one phase after another. Use as a context manager."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[speed]}"),
            console=self.console,
            disable=not self.console.is_terminal,
            transient=True,
        )
        self.task: TaskID | None = None
        self.num_tokens = 0
        self._phase = ""

    def __enter__(self) -> "CorpusProgress":
        self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()

    def start(self, phase: str, *, num_rows: Optional[int], max_tokens_per_row: int) -> None:
        """Begin a phase of `num_rows` rows, None where nobody knows how many there will be.

        The time left is guessed from `max_tokens_per_row` until rows have been finished.
        """
        self._phase, self._num_rows, self._max_tokens = phase, num_rows, max_tokens_per_row
        self._num_done = self._num_reused = 0
        self.num_tokens = 0
        self._started_s = self._line_s = time.monotonic()
        if self.task is not None:
            self.bar.remove_task(self.task)
        self.task = self.bar.add_task(phase, total=num_rows, speed="")

    def tokens(self, num_new: int) -> None:
        """Some rows of the running batch got a token each."""
        self.num_tokens += num_new
        self._show()

    def rows_done(self, num_rows: int, *, reused: bool) -> None:
        """Rows that are on disk now; reused ones cost no time and are left out of the speed."""
        self._num_done += num_rows
        self._num_reused += num_rows if reused else 0
        self._show(advance=num_rows)
        if num_rows and self._num_rows is not None and self._num_done >= self._num_rows:
            self._print_line()

    @property
    def tokens_per_second(self) -> float:
        """Mean speed of the phase so far."""
        return self.num_tokens / max(time.monotonic() - self._started_s, 1e-9)

    def seconds_left(self) -> Optional[float]:
        """Rows left, at the mean number of tokens of the finished rows, at the speed so far; None where unknown."""
        if self._num_rows is None:
            return None
        made = self._num_done - self._num_reused
        # Tokens of rows under way are counted, their rows are not: early on that alone would say too much.
        tokens_per_row = min(self.num_tokens / made, self._max_tokens) if made else self._max_tokens
        left = max(0.0, (self._num_rows - self._num_reused) * tokens_per_row - self.num_tokens)
        return left / max(self.tokens_per_second, 1e-9)

    def _show(self, advance: int = 0) -> None:
        if self.task is not None and not self.bar.disable:
            self.bar.update(self.task, advance=advance, speed=self._speed())
        elif time.monotonic() - self._line_s > _LINE_EVERY_S:
            self._print_line()

    def _print_line(self) -> None:
        self._line_s = time.monotonic()
        self.console.print(self._line(), highlight=False)

    def _line(self) -> str:
        total = "" if self._num_rows is None else f"/{self._num_rows}"
        return f"{self._phase}: {self._num_done}{total} rows, {self._speed()}"

    def _speed(self) -> str:
        if not self.num_tokens:
            return "reused" if self._num_reused else ""
        left = self.seconds_left()
        shown = "" if left is None else f", {left:.0f} s left"
        return f"{self.num_tokens} tokens, {self.tokens_per_second:.0f} tokens/s{shown}"
