"""An engine's processes end with this one, also when SIGKILL leaves it no time to end them.

vLLM's engine does not notice that the process which made it is gone: it would stay for good, with its memory.
"""

import os
import subprocess
import sys

# Knows the processes by descriptors, not by ids that others may have got meanwhile.
_WATCHER = """
import os, select, signal, sys, psutil

def children(parent):
    try:
        return {child.pid for child in psutil.Process(parent).children(recursive=True)} - {os.getpid()}
    except psutil.Error:
        return set()

parent = int(sys.argv[1])
watched, engines, others = os.pidfd_open(parent), {}, children(parent)
print("watching", flush=True)
while not select.select([watched], [], [], 0.5)[0]:
    for pid in children(parent) - others - set(engines):
        try:
            engines[pid] = os.pidfd_open(pid)
        except OSError:
            pass
for engine in engines.values():
    try:
        signal.pidfd_send_signal(engine, signal.SIGKILL)
    except OSError:
        pass
"""


class OrphanGuard:
    """A small process that ends what this process starts from now on as soon as it is gone itself. Linux only."""

    def __init__(self) -> None:
        """Start it, and wait until it watches."""
        self._process = subprocess.Popen(
            [sys.executable, "-c", _WATCHER, str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            start_new_session=True,  # out of reach of what is sent to the whole group
        )
        assert self._process.stdout is not None
        self._process.stdout.readline()

    def close(self) -> None:
        """Leave the processes that were started to themselves."""
        self._process.kill()
        self._process.communicate()
