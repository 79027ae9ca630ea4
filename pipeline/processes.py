"""Telling a living process from one that was killed."""

import psutil


def process_mark(pid: int) -> str:
    """A process's id with its start time, which tells it from a later process with the same id."""
    return f"{pid}@{psutil.Process(pid).create_time():.0f}"


def is_alive(mark: str) -> bool:
    """Whether the process that this mark was made for still runs on this machine."""
    try:
        return process_mark(int(mark.partition("@")[0])) == mark
    except (ValueError, psutil.Error):
        return False
