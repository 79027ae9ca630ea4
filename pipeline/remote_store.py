"""Finished stages and prompts files in stores that fsspec knows by their URLs (`s3://`, `gs://`, `file://`, ...).

A run works on its own disk, as locks, fsync and renames want it. A store holds copies of whole stages:

    <root>/<stage>/<fingerprint12>/<upload>/...    the files of one upload; no two uploads share a folder
    <root>/<stage>/<fingerprint12>.json            written last: which upload is the finished one, with a hash of each file

What has no such last file, or does not agree with it, is not there for a reader: an upload that was cut short, or two at
a time, can do no harm.
"""

import hashlib
import json
import logging
import os
import shutil
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from pipeline.schema import Config
from pipeline.store import file_revision, read_record, write_json

log = logging.getLogger(__name__)

#: What another machine's run can take over. The rest are figures of a machine's clock, or stand on such figures.
FETCHED = ("corpus", "distill", "eval")
#: The exported draft is what people look for in a store.
PUBLISHED = (*FETCHED, "export")
_PROMPT_SUFFIXES = (".jsonl", ".json", ".parquet", ".csv")


class RemoteStore:
    """Finished stage folders at a URL.

    After the first look at the store nothing here raises: what fails is said, the work is done or kept on this disk, and the
    next run tries again.
    """

    def __init__(self, url: str) -> None:
        """Open the store and write to it.

        Raises:
            ValueError: no such kind of store here, or it cannot be written.
        """
        self.url = url
        self.fs, self.root = _open(url, field="artifacts_store")
        probe = f"{self.root}/.write-test-{uuid.uuid4().hex}"
        try:
            self.fs.makedirs(self.root, exist_ok=True)
            self.fs.pipe_file(probe, b"")
            self.fs.rm_file(probe)
        except Exception as error:  # each kind of store has its own types; each means the same here
            raise ValueError(
                f"artifacts_store={url!r} cannot be written: {_said(error)}. Check the place and the credentials, or set "
                "artifacts_store=null to keep everything in artifacts_dir alone"
            ) from error

    def is_folder(self, folder: Path) -> bool:
        """Whether the store is this folder of this machine."""
        return isinstance(self.fs, LocalFileSystem) and Path(self.root).resolve() == folder.resolve()

    def fetch(self, stage: str, fingerprint: str, folder: Path) -> bool:
        """Put the finished stage at `folder`, as a whole or not at all; False where the store does not have it."""
        if stage not in FETCHED or folder.exists():
            return False
        fresh = folder.with_name(f"{folder.name}.fetching-{os.getpid()}")
        try:
            marker = self._marker(stage, fingerprint)
            if marker is None:
                return False
            self._download(marker, f"{self._place(stage, fingerprint)}/{marker['upload']}", fresh)
            record = read_record(fresh)
            if record is None or record.fingerprint != fingerprint:
                raise ValueError("its stage.json is that of other work")
            fresh.rename(folder)
        except Exception as error:  # as above
            log.warning("artifacts_store=%r: %s/%s cannot be fetched and is made here: %s", self.url, stage, folder.name, _said(error))
            return False
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
        return True

    def publish(self, stage: str, fingerprint: str, folder: Path) -> bool:
        """Copy a finished stage into the store, where it is not there yet; whether it was copied."""
        if stage not in PUBLISHED:
            return False
        place, upload = self._place(stage, fingerprint), uuid.uuid4().hex[:12]
        try:
            if self._marker(stage, fingerprint) is not None:
                return False
            hashes = {name: file_revision(folder / name) for name in _files(folder)}
            for name in hashes:
                target = f"{place}/{upload}/{name}"
                self.fs.makedirs(str(PurePosixPath(target).parent), exist_ok=True)
                self.fs.put_file(str(folder / name), target)
            marker = {"fingerprint": fingerprint, "upload": upload, "files": hashes}
            self.fs.pipe_file(f"{place}.json", json.dumps(marker, indent=2).encode())
        except Exception as error:  # as above
            log.warning(
                "artifacts_store=%r: %s/%s was not stored: %s. It is finished in artifacts_dir, and the next run tries again",
                self.url, stage, folder.name, _said(error),
            )  # fmt: skip
            return False
        return True

    def _place(self, stage: str, fingerprint: str) -> str:
        return f"{self.root}/{stage}/{fingerprint[:12]}"

    def _marker(self, stage: str, fingerprint: str) -> dict[str, Any] | None:
        """What says that an upload is whole; None where there is none, or half of one."""
        try:
            marker: dict[str, Any] = json.loads(self.fs.cat_file(f"{self._place(stage, fingerprint)}.json"))
        except (FileNotFoundError, json.JSONDecodeError, UnicodeDecodeError):
            return None
        return marker if marker.get("fingerprint") == fingerprint else None

    def _download(self, marker: dict[str, Any], place: str, fresh: Path) -> None:
        for name, revision in marker["files"].items():
            file = fresh / name
            if not file.resolve().is_relative_to(fresh.resolve()):
                raise ValueError(f"it names a file outside of its folder: {name}")
            file.parent.mkdir(parents=True, exist_ok=True)
            self.fs.get_file(f"{place}/{name}", str(file))
            if file_revision(file) != revision:
                raise ValueError(f"{name} is damaged")


def with_local_prompts(config: Config) -> Config:
    """The configuration with a local copy of each prompts file that is given as a URL, in `<artifacts_dir>/inputs/`.

    Raises:
        ValueError: it cannot be had; the field is named.
    """
    folder = Path(config.artifacts_dir) / "inputs"

    def local(prompts: str | None, field: str) -> str | None:
        return _local_copy(prompts, folder, field=field) if prompts is not None and "://" in prompts else prompts

    corpus = replace(
        config.corpus,
        prompts=local(config.corpus.prompts, "corpus.prompts"),
        mixture=[replace(one, prompts=local(one.prompts, "corpus.mixture")) for one in config.corpus.mixture],
    )
    evaluation = replace(config.eval, prompts=local(config.eval.prompts, "eval.prompts"))
    bench = replace(config.bench, prompts=local(config.bench.prompts, "bench.prompts"))
    return replace(config, corpus=corpus, eval=evaluation, bench=bench)


def _local_copy(url: str, folder: Path, *, field: str) -> str:
    """The file at `url` on this disk; it is read again only when the store says that it is another one now."""
    name = PurePosixPath(url).name
    if not name.endswith(_PROMPT_SUFFIXES):
        raise ValueError(f"{field}={url!r}: a URL has to name one file, {', '.join(_PROMPT_SUFFIXES)}")
    fs, place = _open(url, field=field)
    file = folder / hashlib.sha256(url.encode()).hexdigest()[:12] / name
    record = file.with_name("source.json")
    try:
        version = str(fs.checksum(place))
        if file.is_file() and _read_json(record) == {"url": url, "version": version}:
            return str(file)
        file.parent.mkdir(parents=True, exist_ok=True)
        fresh = file.with_name(f".{os.getpid()}.{name}")
        fs.get_file(place, str(fresh))
        fresh.replace(file)
        write_json(record, {"url": url, "version": version})
    except Exception as error:  # each kind of store has its own types; each means that the file cannot be had
        raise ValueError(f"{field}={url!r} cannot be read: {_said(error)}") from error
    return str(file)


def _open(url: str, *, field: str) -> tuple[Any, str]:
    try:
        fs, root = fsspec.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise ValueError(
            f"{field}={url!r}: {error}. Known without further packages: file://, http(s)://, hf://; s3:// needs s3fs, gs:// gcsfs"
        ) from error
    return fs, str(root).rstrip("/")


def _files(folder: Path) -> Iterator[str]:
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            yield file.relative_to(folder).as_posix()


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
