"""Telling a living process from one that was killed, and one process at a time."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil


def process_mark(pid: int) -> str:
    """A process's id with its start time, which tells it from a later process with the same id."""
    return f"{pid}@{psutil.Process(pid).create_time():.0f}"


def is_alive(mark: str) -> bool:
    """Whether the process that this mark was made for still runs on this machine."""
    try:
        pid = int(mark.partition("@")[0])
        # A zombie is dead; its parent, often a container's first process, has not asked for its exit code.
        return process_mark(pid) == mark and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except (ValueError, psutil.Error):
        return False


@contextmanager
def folder_held(folder: Path) -> Iterator[None]:
    """One process at a time for each folder, which has to be there. A holder that dies lets go."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
