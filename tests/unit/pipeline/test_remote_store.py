"""Finished stages in a store: taken from it as a whole or not at all, and nothing is lost where it fails."""

import json
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from pipeline import runner
from pipeline.context import StageContext
from pipeline.models import ModelRef
from pipeline.remote_store import RemoteStore
from pipeline.runner import run_stages
from pipeline.stages import STAGES
from pipeline.store import read_record
from tests.conftest import Composer

NAMES = ("preflight", "corpus", "distill")
Walk = tuple[list[str], Callable[..., dict[str, Path]]]


class BrokenStore(MemoryFileSystem):
    """Takes so many files, and then none; with `unreadable` it gives none either."""

    protocol = "broken"
    num_left = 10**6
    unreadable = False

    def put_file(self, lpath: str, rpath: str, **options: Any) -> None:
        BrokenStore.num_left -= 1
        if BrokenStore.num_left < 0:
            raise ConnectionError("the line is cut")
        super().put_file(lpath, rpath, **options)

    def cat_file(self, path: str, *rest: Any, **options: Any) -> Any:
        if BrokenStore.unreadable:
            raise PermissionError("not yours")
        return super().cat_file(path, *rest, **options)


@pytest.fixture(params=["memory", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty store."""
    place = f"memory://{uuid.uuid4().hex}" if request.param == "memory" else f"file://{tmp_path}/store"
    return f"{place}/some/prefix"


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> str:
    fsspec.register_implementation("broken", BrokenStore, clobber=True)
    monkeypatch.setattr(BrokenStore, "num_left", 10**6)
    monkeypatch.setattr(BrokenStore, "unreadable", False)
    return f"broken://{uuid.uuid4().hex}"


@pytest.fixture
def walk(monkeypatch: pytest.MonkeyPatch, make_config: Composer, tmp_path: Path) -> Walk:
    """`run(machine, "key=value")` runs three stages on a disk of that machine's own; they write a few files each."""
    calls: list[str] = []

    def work(context: StageContext, name: str) -> dict[str, object]:
        calls.append(name)
        (context.work_dir / "shards").mkdir(exist_ok=True)
        for part in ("a", "b", "c"):
            (context.work_dir / "shards" / part).write_bytes(f"{name} {part} {uuid.uuid4()}".encode())
        return {}

    monkeypatch.setattr(runner, "STAGES", tuple(stage for stage in STAGES if stage.name in NAMES))
    monkeypatch.setattr(runner, "check_inputs", lambda config: None)
    monkeypatch.setattr(runner, "resolve_target", lambda config: ModelRef("somewhere", "target", "abc"))
    monkeypatch.setattr(
        runner, "load_function", lambda reference: lambda context: work(context, stage_named(reference))
    )

    def stage_named(function: str) -> str:
        return next(stage.name for stage in STAGES if stage.function == function)

    def run(machine: str, store: str | None, *overrides: str) -> dict[str, Path]:
        words = ["+experiment=tiny", "tracking=off", f"artifacts_dir={tmp_path / machine}", f"stages=[{','.join(NAMES)}]"]
        config = make_config(*words, *overrides)
        return run_stages(replace(config, artifacts_store=store))

    return calls, run


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def uploads(url: str, stage: str) -> list[str]:
    fs, root = fsspec.url_to_fs(url)
    return [name for name in fs.glob(f"{root}/{stage}/*/*") if fs.isdir(name)]


def test_another_machine_takes_what_the_first_one_made(walk: Walk, url: str) -> None:
    """But what a clock measured: that is each machine's own."""
    calls, run = walk
    first = run("one", url)
    second = run("two", url)
    assert calls == [*NAMES, "preflight"]
    for name in ("corpus", "distill"):
        assert contents(first[name]) == contents(second[name]) and len(contents(first[name])) == 4
        assert first[name] != second[name] and read_record(second[name]) == read_record(first[name])
        assert (second[name].parents[1] / "latest" / name).resolve() == second[name]
    assert run("three", url, "stages=[distill]").keys() == {"corpus", "distill"}, "upstream stages come from there too"
    assert calls == [*NAMES, "preflight"]
    assert not list(first["corpus"].parents[2].glob("*/*/*.fetching*"))
    run("two", url, "loss=tv")
    assert calls[4:] == ["distill"]


def test_a_second_run_stores_nothing_again(walk: Walk, url: str) -> None:
    _, run = walk
    run("one", url)
    before = uploads(url, "corpus")
    run("one", url)
    run("two", url)
    assert uploads(url, "corpus") == before and len(before) == 1
    assert uploads(url, "preflight") == []


@pytest.mark.parametrize("damage", ["no marker", "half a marker", "a file less", "another file", "foreign work", "outside"])
def test_what_is_not_whole_is_made_here(
    walk: Walk, url: str, damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    calls, run = walk
    folder = run("one", url)["corpus"]
    fs, root = fsspec.url_to_fs(url)
    marker = f"{root}/corpus/{folder.name}.json"
    upload = uploads(url, "corpus")[0]
    content = json.loads(fs.cat_file(marker))
    if damage == "no marker":
        fs.rm_file(marker)
    elif damage == "half a marker":
        fs.pipe_file(marker, fs.cat_file(marker)[:-9])
    elif damage == "a file less":
        fs.rm_file(f"{upload}/shards/b")
    elif damage == "another file":
        fs.pipe_file(f"{upload}/shards/b", b"corpus b")
    elif damage == "foreign work":
        fs.pipe_file(marker, json.dumps({**content, "fingerprint": "0" * 64}).encode())
    else:
        fs.pipe_file(marker, json.dumps({**content, "files": {**content["files"], "../../out": "0"}}).encode())
    calls.clear()
    made = run("two", url)["corpus"]
    assert calls == ["preflight", "corpus"], "the distill stage is still there"
    assert len(contents(made)) == 4 and not (tmp_path / "two" / "out").exists()
    is_said = damage in ("a file less", "another file", "outside")
    assert ("cannot be fetched and is made here" in caplog.text) is is_said
    assert sorted(path.name for path in made.parent.iterdir()) == [made.name]


def test_an_upload_that_was_cut_short_is_made_up_for(walk: Walk, broken: str, caplog: pytest.LogCaptureFixture) -> None:
    calls, run = walk
    BrokenStore.num_left = 2
    folder = run("one", broken)["corpus"]
    assert len(contents(folder)) == 4 and "was not stored: ConnectionError: the line is cut" in caplog.text
    BrokenStore.num_left = 10**6
    calls.clear()
    run("two", broken, "stages=[corpus]")
    assert calls == ["corpus"], "half an upload is none"
    calls.clear()
    run("one", broken)
    assert run("three", broken)["distill"] and calls == ["preflight"]


def test_a_store_that_cannot_be_read_costs_no_work(walk: Walk, broken: str, caplog: pytest.LogCaptureFixture) -> None:
    calls, run = walk
    run("one", broken)
    BrokenStore.unreadable = True
    run("two", broken)
    assert calls == [*NAMES, *NAMES] and "PermissionError: not yours" in caplog.text


@pytest.mark.parametrize(
    ("store", "message"),
    [
        ("nothing://x", r"artifacts_store='nothing://x': .*s3fs"),
        ("file:///proc/none/x", r"artifacts_store='file:///proc/none/x' cannot be written: .*artifacts_store=null"),
    ],
)
def test_a_store_that_cannot_be_used_is_said_before_any_work(walk: Walk, store: str, message: str) -> None:
    calls, run = walk
    with pytest.raises(ValueError, match=message):
        run("one", store)
    assert calls == []


def test_the_folder_of_the_artifacts_is_no_store_for_them(walk: Walk, tmp_path: Path) -> None:
    calls, run = walk
    with pytest.raises(ValueError, match="is artifacts_dir itself"):
        run("one", (tmp_path / "one").as_uri())
    assert calls == []


def test_two_uploads_of_the_same_work_leave_one_whole(tmp_path: Path, url: str) -> None:
    """As two machines may make the same stage at a time, with other bytes in it."""
    fingerprint = "f" * 64
    record = {"fingerprint": fingerprint, "stage": "corpus", "stage_version": 1, "config": {}, "inputs": {}, "figures": {},
              "seconds": 1.0, "resumed": False, "versions": {}, "git_commit": None}  # fmt: skip
    stores = [RemoteStore(url), RemoteStore(url)]
    for number in range(2):
        folder = tmp_path / f"machine{number}"
        folder.mkdir()
        (folder / "stage.json").write_text(json.dumps(record))
        (folder / "x").write_text(str(number))
    marker = stores[0]._marker
    stores[0]._marker = lambda stage, one: None  # type: ignore[method-assign]  # it looked before the other one was done
    assert stores[1].publish("corpus", fingerprint, tmp_path / "machine1")
    assert stores[0].publish("corpus", fingerprint, tmp_path / "machine0")
    stores[0]._marker = marker  # type: ignore[method-assign]
    assert stores[0].fetch("corpus", fingerprint, tmp_path / "third") and (tmp_path / "third" / "x").read_text() == "0"


PROMPTS = '{"prompt": "one"}\n{"prompt": "two"}\n'


def test_prompts_files_may_be_urls(make_config: Composer, tmp_path: Path, url: str) -> None:
    """They are read anew only when they have changed."""
    fs, root = fsspec.url_to_fs(url)
    fs.makedirs(root, exist_ok=True)
    fs.pipe_file(f"{root}/p.jsonl", PROMPTS.encode())
    words = [f"artifacts_dir={tmp_path / 'a'}", "corpus=prompts", f"corpus.prompts={url}/p.jsonl", f"eval.prompts={url}/p.jsonl"]
    config = make_config(*words, f"bench.prompts={url}/p.jsonl")
    assert config.corpus.prompts is not None
    file = Path(config.corpus.prompts)
    assert file.read_text() == PROMPTS and file.name == "p.jsonl" and file.is_relative_to(tmp_path / "a" / "inputs")
    assert config.eval.prompts == config.bench.prompts == config.corpus.prompts
    before = file.stat().st_mtime_ns
    make_config(*words)
    assert file.stat().st_mtime_ns == before
    fs.pipe_file(f"{root}/p.jsonl", b'{"prompt": "three, and longer"}\n')
    make_config(*words)
    assert "three" in file.read_text()
    mixed = make_config(*words[:1], f"corpus.mixture=[{{prompts: '{url}/p.jsonl'}}, {{prompts: null}}]")
    assert [one.prompts for one in mixed.corpus.mixture] == [str(file), None]


@pytest.mark.parametrize(
    ("name", "message"),
    [("missing.jsonl", r"corpus.prompts='.*/missing.jsonl' cannot be read"), ("folder", "has to name one file, .jsonl")],
)
def test_prompts_that_are_not_there_are_named(make_config: Composer, tmp_path: Path, url: str, name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_config(f"artifacts_dir={tmp_path}", "corpus=prompts", f"corpus.prompts={url}/{name}")
