"""What went wrong, and whose it is: the exit code and the message follow from it."""

import traceback
from pathlib import Path

EXIT_CRASH = 1
EXIT_USER_MISTAKE = 2
EXIT_GATE = 3
EXIT_INTERRUPTED = 130

_OWN_PACKAGES = ("pipeline", "distill", "eval", "specdec_runtime")
_ROOT = Path(__file__).resolve().parent.parent


class GateFailure(Exception):
    """A value that the `gate` group asks for was not reached. The artifacts of the run are kept."""


def is_own_file(path: str) -> bool:
    """True when `path` is a source file of this project, and not of a library."""
    try:
        relative = Path(path).resolve().relative_to(_ROOT)
    except ValueError:
        return False
    return relative.parts[0] in _OWN_PACKAGES


def is_user_mistake(error: BaseException) -> bool:
    """True for a `ValueError` that this project's own code raised on purpose.

    A `ValueError` out of a library's depths is a defect, and keeps its traceback.
    """
    if not isinstance(error, ValueError):
        return False
    frames = traceback.extract_tb(error.__traceback__)
    return not frames or is_own_file(frames[-1].filename)


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
