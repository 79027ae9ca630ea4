"""An engine's processes go with the process that made them, however that one ends."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests.conftest import ROOT

PROGRAM = """
import runpy, subprocess, sys, time
if sys.argv[1] == "guarded":
    guard = runpy.run_path("pipeline/corpus/backends/orphans.py")["OrphanGuard"]()
    if len(sys.argv) > 2:
        guard.close()
engine = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
time.sleep(1.5)
print(engine.pid, flush=True)
time.sleep(60)
"""


def is_alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="Linux only, as vLLM is")
@pytest.mark.parametrize("words", [["guarded"], ["alone"], ["guarded", "closed"]])
def test_sigkill_takes_along_what_was_started_under_a_guard(words: list[str]) -> None:
    """And what was not stays: the test would notice if the system did this by itself."""
    maker = subprocess.Popen([sys.executable, "-c", PROGRAM, *words], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert maker.stdout is not None
    engine, goes_along = int(maker.stdout.readline()), words == ["guarded"]
    try:
        assert is_alive(engine)
        maker.kill()
        maker.wait()
        deadline = time.monotonic() + (20 if goes_along else 1)
        while is_alive(engine) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert is_alive(engine) is not goes_along
    finally:
        if is_alive(engine):
            os.kill(engine, signal.SIGKILL)
