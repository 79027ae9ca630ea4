"""What went wrong, and whose it is: the exit code and the message follow from it."""

import errno
import io
import os
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

EXIT_CRASH = 1
EXIT_USER_MISTAKE = 2
EXIT_GATE = 3
EXIT_INTERRUPTED = 130

_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
#: How libraries say it that write with code of their own: safetensors in the system's words, PyTorch in none.
_DISK_WORDS = (*(os.strerror(number) for number in _DISK_ERRORS), "PytorchStreamWriter failed writing")
_OWN_PACKAGES = ("pipeline", "distill", "eval", "specdec_runtime")
_ROOT = Path(__file__).resolve().parent.parent


class GateFailure(Exception):
    """A value that the `gate` group asks for was not reached. The artifacts of the run are kept."""


def print_anything() -> None:
    """Let no character end a run: a terminal or log that cannot show one gets its code in its place."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def is_own_file(path: str) -> bool:
    """True when `path` is a source file of this project, and not of a library."""
    try:
        relative = Path(path).resolve().relative_to(_ROOT)
    except ValueError:
        return False
    return relative.parts[0] in _OWN_PACKAGES


def is_user_mistake(error: BaseException) -> bool:
    """True for a `ValueError`, or a loss that is no number, that this project's own code raised on purpose.

    A `ValueError` out of a library's depths is a defect, and keeps its traceback.
    """
    if not isinstance(error, (ValueError, FloatingPointError)):
        return False
    frames = traceback.extract_tb(error.__traceback__)
    return not frames or is_own_file(frames[-1].filename)


def message_of(error: BaseException) -> str | None:
    """What to print in place of a traceback, where the way out lies with the user; None for a defect."""
    if is_user_mistake(error):
        return describe(error)
    for cause in (error, *_behind(error)):
        text = str(cause).strip()
        if (isinstance(cause, OSError) and cause.errno in _DISK_ERRORS) or any(word in text for word in _DISK_WORDS):
            return (
                f"a file cannot be written: {text.splitlines()[0]}\nFree some space on the disk, or take another one; then the same "
                "command goes on from here: what was finished is kept"
            )
    return None


def describe(error: BaseException) -> str:
    """The message of an error with those of its causes, each said once."""
    parts: list[str] = []
    current: BaseException | None = error
    while current is not None:
        text = str(current).strip() or type(current).__name__
        if not any(text in part for part in parts):
            parts.append(text)
        current = current.__cause__
    return "\n".join(parts)


def _behind(error: BaseException) -> Iterator[BaseException]:
    """The errors that led to this one, raised from them or while they were handled."""
    while (cause := error.__cause__ or error.__context__) is not None:
        yield cause
        error = cause
