"""Finished work is found again, and nothing else is taken for it."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from pipeline.store import StageRecord, Store
from tests.conftest import ROOT


def record_of(stage: str, fingerprint: str) -> StageRecord:
    return StageRecord(stage, 1, fingerprint, {}, {}, {}, 0.0, False, {}, None)


def test_a_folder_is_finished_only_with_its_own_record(tmp_path: Path) -> None:
    store = Store(tmp_path)
    fingerprint = "a" * 64
    store.work_dir("corpus", fingerprint).mkdir(parents=True)
    assert store.finished("corpus", fingerprint) is None
    folder = store.finish(record_of("corpus", fingerprint))
    assert store.finished("corpus", fingerprint) == record_of("corpus", fingerprint)
    assert store.finished("corpus", "a" * 12 + "b" * 52) is None
    (folder / "stage.json").write_text("{")
    assert store.finished("corpus", fingerprint) is None


def test_a_damaged_folder_is_set_aside_and_made_anew(tmp_path: Path) -> None:
    store = Store(tmp_path)
    fingerprint = "a" * 64
    store.folder("corpus", fingerprint).mkdir(parents=True)
    store.work_dir("corpus", fingerprint).mkdir()
    assert (
        store.finished("corpus", store.finish(record_of("corpus", fingerprint)).name + "a" * 52) is not None
    )
    assert len(list((tmp_path / "corpus").glob("*.damaged-*"))) == 1


def test_an_unwritable_folder_is_refused_by_name(tmp_path: Path) -> None:
    """Each write failed and the exit code was 0 (speculators 743): refused before any work."""
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(ValueError, match=r"artifacts_dir=.*file/artifacts: cannot be written"):
        Store(blocked / "artifacts")


@pytest.mark.parametrize("in_the_way", ["latest/corpus/shards", "latest"])
def test_a_copy_that_followed_the_links_is_named(tmp_path: Path, in_the_way: str) -> None:
    store = Store(tmp_path)
    (tmp_path / in_the_way).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / in_the_way).write_text("")
    with pytest.raises(ValueError, match="cannot be made a link to .*: remove .*latest, which holds links only"):
        store.link_latest("corpus", tmp_path / "corpus" / "a")
    assert not list(tmp_path.rglob(".corpus-*"))


HOLDER = """
    import sys, time
    from pathlib import Path
    from pipeline.store import Store
    with Store(Path(sys.argv[1])).lock("corpus", "a" * 64):
        print("held", flush=True)
        time.sleep(60)
"""


def test_work_is_held_against_another_process_until_that_one_dies(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(HOLDER), str(tmp_path)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        waiter = multiprocessing.get_context("fork").Process(target=_take_lock, args=(tmp_path,))
        waiter.start()
        time.sleep(0.5)
        assert not (tmp_path / "taken").exists()
        holder.send_signal(signal.SIGKILL)
        waiter.join(20)
        assert (tmp_path / "taken").exists()
        assert not list(tmp_path.glob("corpus/*.lock"))
    finally:
        holder.kill()
        holder.wait()


def _take_lock(root: Path) -> None:
    with Store(root).lock("corpus", "a" * 64):
        (root / "taken").write_text(str(os.getpid()))


def test_eight_processes_take_the_same_lock_in_turn(tmp_path: Path) -> None:
    """Each removes the file as it gives the lock up, while others open it, wait on it, or look whether it is still there."""
    (tmp_path / "count").write_text("0")
    processes = [multiprocessing.get_context("fork").Process(target=_count, args=(tmp_path,)) for _ in range(8)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * 8
    assert (tmp_path / "count").read_text() == str(8 * 100)
    assert not list(tmp_path.glob("corpus/*.lock"))


def _count(root: Path) -> None:
    store = Store(root)
    for _ in range(100):
        with store.lock("corpus", "a" * 64):
            (root / "count").write_text(str(int((root / "count").read_text()) + 1))


def test_record_is_plain_json(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.work_dir("corpus", "a" * 64).mkdir(parents=True)
    text = (store.finish(record_of("corpus", "a" * 64)) / "stage.json").read_text()
    assert json.loads(text)["fingerprint"] == "a" * 64
