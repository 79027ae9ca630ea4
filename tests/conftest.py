"""What all tests share: one thread, no network, and configurations composed as the entry point composes them."""

import os

# Before torch is imported: with several test processes, more threads than one only get in each other's way.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("MPLBACKEND", "agg")

import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from hydra import compose, initialize_config_dir

from pipeline.config import conf_dir, register_schema, to_config
from pipeline.schema import Config

ROOT = Path(__file__).resolve().parent.parent

Composer = Callable[..., Config]
Entry = Callable[..., subprocess.CompletedProcess[str]]


def processes_below(parent: int, word: str) -> set[psutil.Process]:
    """Those that live below a process, and have the word in their name or command."""
    found = set()
    for child in psutil.Process(parent).children(recursive=True):
        with suppress(psutil.Error):  # others may end meanwhile
            if child.status() != psutil.STATUS_ZOMBIE and word in " ".join([child.name(), *child.cmdline()]):
                found.add(child)
    return found


def run_module(
    module: str, *arguments: str, folder: Path, timeout_s: float = 240
) -> subprocess.CompletedProcess[str]:
    """`python -m module` with the folder as its working folder, this repository's code, and wide tables."""
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"},
        text=True,
        capture_output=True,
        timeout=timeout_s,
        check=False,
    )


@pytest.fixture
def make_config() -> Composer:
    """`make_config("+experiment=tiny", "loss=tv")` is the checked configuration of that command line."""
    register_schema()

    def make(*overrides: str) -> Config:
        with initialize_config_dir(str(conf_dir()), version_base="1.3"):
            return to_config(compose("config", overrides=list(overrides)))

    return make


@pytest.fixture
def run_entry(tmp_path: Path) -> Entry:
    """`run_entry("+experiment=tiny")` runs the entry point in an empty folder, with artifacts inside it."""

    def run(*arguments: str, timeout_s: float = 240) -> subprocess.CompletedProcess[str]:
        return run_module("pipeline", *arguments, folder=tmp_path, timeout_s=timeout_s)

    return run
