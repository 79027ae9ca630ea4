"""Claims: who has a block, and whether anybody else may have written since the last look."""

import multiprocessing
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from pipeline.corpus.claims import Claims


def _obey(path: Path, pipe: Connection) -> None:
    """Another worker, which does what it is told."""
    claims = Claims(path)
    pipe.send("ready")
    while (order := pipe.recv()) is not None:
        pipe.send(getattr(claims, order[0])(*order[1:]))
    claims.close()


class Worker:
    """A worker in another process: a process's own locks never stand in its way."""

    def __init__(self, path: Path) -> None:
        context = multiprocessing.get_context("fork")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_obey, args=(path, theirs), daemon=True)
        self.process.start()
        assert self._pipe.recv() == "ready"

    def ask(self, *order: object) -> object:
        self._pipe.send(order)
        return self._pipe.recv()

    def leave(self) -> None:
        self._pipe.send(None)
        self.process.join()

    def die(self) -> None:
        self.process.kill()
        self.process.join()


@pytest.fixture
def claims(tmp_path: Path) -> Iterator[Claims]:
    claims = Claims(tmp_path / "claims.lock")
    yield claims
    claims.close()


def test_a_block_is_one_workers_until_it_releases_it_or_dies(claims: Claims, tmp_path: Path) -> None:
    other = Worker(tmp_path / "claims.lock")
    assert claims.take(0) and other.ask("take", 1)
    assert not claims.take(1) and not other.ask("take", 0)
    claims.release(0)
    assert other.ask("take", 0)
    other.die()
    assert claims.take(0) and claims.take(1)


@pytest.mark.parametrize("end", ["leave", "die"])
def test_whoever_was_there_since_the_last_look_is_noticed(claims: Claims, tmp_path: Path, end: str) -> None:
    """Also who came and went between two looks, and who was there at one and gone at the next."""
    assert claims.others_may_have_written(), "before the first look"
    assert not claims.others_may_have_written()
    getattr(Worker(tmp_path / "claims.lock"), end)()
    assert claims.others_may_have_written()
    assert not claims.others_may_have_written()
    stays = Worker(tmp_path / "claims.lock")
    assert claims.others_may_have_written() and claims.others_may_have_written()
    assert stays.ask("others_may_have_written") and stays.ask("others_may_have_written")
    getattr(stays, end)()
    assert claims.others_may_have_written(), "what it wrote after the last look"
    assert not claims.others_may_have_written()
