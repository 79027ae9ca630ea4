"""Finished work on disk, found again by the fingerprint of all that it was made from.

A stage works in `<artifacts_dir>/<stage>/<fingerprint12>.incomplete/`; `stage.json` is written there last and the
folder renamed, so a folder under its plain name is always whole. The disk is the only truth.
"""

import fcntl
import hashlib
import json
import os
import platform
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

RECORD_NAME = "stage.json"
UNFINISHED = ".incomplete"
_PACKAGES = ("torch", "transformers", "trl", "datasets", "accelerate", "numpy", "safetensors", "gguf")


@dataclass(frozen=True)
class StageRecord:
    """What `stage.json` holds. `seconds` is the time of the attempt that finished; `resumed` says that there were others."""

    stage: str
    stage_version: int
    fingerprint: str
    config: dict[str, Any]
    inputs: dict[str, str]
    figures: dict[str, Any]
    seconds: float
    resumed: bool
    versions: dict[str, str]
    git_commit: str | None


def fingerprint_of(content: Mapping[str, Any]) -> str:
    """The sha256 of the canonical JSON of `content`: sorted keys, no spaces, no NaN."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def file_revision(path: Path) -> str:
    """The sha256 of a file's content; where it lies and what it is called play no part."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def read_record(folder: Path) -> StageRecord | None:
    """The record of a finished stage folder, or None when there is none that can be read."""
    try:
        return StageRecord(**json.loads((folder / RECORD_NAME).read_text()))
    except (OSError, ValueError, TypeError):
        return None


class Store:
    """The stage folders under `artifacts_dir`."""

    def __init__(self, artifacts_dir: Path) -> None:
        """Make the folder.

        Raises:
            ValueError: it cannot be made or written.
        """
        self.root = artifacts_dir.absolute()
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            probe = self.root / f".write-test-{os.getpid()}"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise ValueError(
                f"artifacts_dir={artifacts_dir}: cannot be written ({error.strerror}); choose a folder that can, "
                "as in artifacts_dir=/path/to/folder"
            ) from error

    def folder(self, stage: str, fingerprint: str) -> Path:
        """Where the finished work lies, or will lie."""
        return self.root / stage / fingerprint[:12]

    def work_dir(self, stage: str, fingerprint: str) -> Path:
        """Where unfinished work lies. What a killed attempt left in it is the start of the next one."""
        return self.root / stage / f"{fingerprint[:12]}{UNFINISHED}"

    def finished(self, stage: str, fingerprint: str) -> StageRecord | None:
        """The record of the finished work with this fingerprint, or None."""
        record = read_record(self.folder(stage, fingerprint))
        return record if record is not None and record.fingerprint == fingerprint else None

    def finish(self, record: StageRecord) -> Path:
        """Write `stage.json` into the work folder and give the folder its plain name."""
        work_dir, folder = (
            self.work_dir(record.stage, record.fingerprint),
            self.folder(record.stage, record.fingerprint),
        )
        write_json(work_dir / RECORD_NAME, asdict(record))
        if folder.exists():  # only a folder without a readable record gets here: its work was made anew
            folder.rename(folder.with_name(f"{folder.name}.damaged-{int(time.time())}"))
        work_dir.rename(folder)
        return folder

    def link_latest(self, stage: str, folder: Path) -> None:
        """Point `latest/<stage>` at `folder`, in one step for anyone who reads it.

        Raises:
            ValueError: something else than a link lies there, as in a copy of the artifacts that followed the links.
        """
        link = self.root / "latest" / stage
        fresh = link.with_name(f".{stage}-{os.getpid()}")
        try:
            link.parent.mkdir(exist_ok=True)
            fresh.unlink(missing_ok=True)
            fresh.symlink_to(os.path.relpath(folder, link.parent), target_is_directory=True)
            fresh.replace(link)
        except (FileExistsError, IsADirectoryError, NotADirectoryError) as error:
            with suppress(OSError):
                fresh.unlink()
            raise ValueError(
                f"{link} cannot be made a link to {folder} ({error.strerror}): remove {link.parent}, which holds links only"
            ) from error

    @contextmanager
    def lock(self, stage: str, fingerprint: str) -> Iterator[None]:
        """Hold this stage's work against other processes; wait while another one has it.

        The kernel gives the lock up when its holder dies, so a killed run leaves nothing to clean.
        """
        path = self.root / stage / f"{fingerprint[:12]}.lock"
        path.parent.mkdir(exist_ok=True)
        descriptor = _acquire(path, stage)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
            os.close(descriptor)


def _acquire(path: Path, stage: str) -> int:
    is_told = False
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(descriptor, 32).decode(errors="replace").strip() or "unknown"
            if not is_told:
                print(f"{stage}: process {holder} does this same work; waiting for it to end", flush=True)
            is_told = True
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if _is_at(path, descriptor):
            os.truncate(descriptor, 0)
            os.pwrite(descriptor, str(os.getpid()).encode(), 0)
            return descriptor
        os.close(descriptor)  # its holder finished and removed the file while we waited


def _is_at(path: Path, descriptor: int) -> bool:
    """Whether the open file is still the one at `path`; if not, others may remove that one at any moment."""
    try:
        return path.stat().st_ino == os.fstat(descriptor).st_ino
    except FileNotFoundError:
        return False


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write JSON so that a reader, or a power cut, finds the whole file or none."""
    fresh = path.with_name(f".{path.name}.tmp")
    with fresh.open("w") as stream:
        json.dump(content, stream, indent=2, ensure_ascii=False)
        stream.flush()
        os.fsync(stream.fileno())
    fresh.replace(path)


def installed_versions() -> dict[str, str]:
    """Python's version and those of the packages that decide what a stage computes."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def git_commit() -> str | None:
    """The checkout's commit, with `-dirty` when files differ from it; None outside a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
