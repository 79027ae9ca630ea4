"""The walk over the stages, with stages of the test's own: reuse, resume, links."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline import runner
from pipeline.context import StageContext
from pipeline.models import ModelRef
from pipeline.runner import run_stages
from pipeline.stages import STAGES
from pipeline.store import read_record
from tests.conftest import Composer

TARGET = ModelRef(path="somewhere", name="target", revision="abc")


class Calls(list[str]):
    """Which stages worked, in order."""

    fail_in: str | None = None


Walk = tuple[Calls, Callable[..., dict[str, Path]]]


@pytest.fixture
def walk(monkeypatch: pytest.MonkeyPatch, make_config: Composer, tmp_path: Path) -> Walk:
    """`run("key=value")` runs preflight, corpus and distill, replaced by functions that write one file each."""
    calls = Calls()

    def work(context: StageContext, name: str) -> dict[str, object]:
        calls.append(name)
        left_behind = [file.name for file in context.work_dir.iterdir()]
        (context.work_dir / "part").write_text(name)
        if calls.fail_in == name:
            raise RuntimeError("broken")
        return {"found": left_behind, "inputs": sorted(context.inputs), "value": 1.5}

    names = ("preflight", "corpus", "distill")
    fakes = tuple(replace(stage, function=f"fake:{stage.name}") for stage in STAGES if stage.name in names)
    monkeypatch.setattr(runner, "STAGES", fakes)
    monkeypatch.setattr(runner, "check_inputs", lambda config: None)
    monkeypatch.setattr(runner, "resolve_target", lambda config: TARGET)
    monkeypatch.setattr(
        runner, "load_function", lambda reference: lambda context: work(context, reference.partition(":")[2])
    )

    def run(*overrides: str) -> dict[str, Path]:
        chosen = "stages=[preflight,corpus,distill]"
        return run_stages(
            make_config("+experiment=tiny", "tracking=off", f"artifacts_dir={tmp_path}", chosen, *overrides)
        )

    return calls, run


def test_finished_work_is_reused_and_a_changed_setting_makes_it_anew(walk: Walk) -> None:
    calls, run = walk
    first = run()
    assert calls == ["preflight", "corpus", "distill"]
    assert run() == first
    assert calls == ["preflight", "corpus", "distill"]
    second = run("loss=tv")
    assert calls[3:] == ["distill"]
    assert second["corpus"] == first["corpus"]
    assert second["distill"] != first["distill"]


def test_a_finished_folder_says_what_it_was_made_from(walk: Walk) -> None:
    _, run = walk
    folders = run()
    record = read_record(folders["distill"])
    assert record is not None
    assert record.fingerprint[:12] == folders["distill"].name
    corpus_record = read_record(folders["corpus"])
    assert corpus_record is not None
    assert record.inputs["corpus"] == corpus_record.fingerprint
    assert record.inputs["target revision"] == "abc"
    assert record.config["loss.weights"] == {"forward_kl": 1.0}
    assert record.figures == {"found": [], "inputs": ["corpus"], "value": 1.5}
    assert record.versions["torch"]
    assert not record.resumed


def test_unfinished_work_is_handed_to_the_next_attempt(walk: Walk, tmp_path: Path) -> None:
    calls, run = walk
    calls.fail_in = "corpus"
    with pytest.raises(RuntimeError):
        run()
    assert [folder.suffix for folder in (tmp_path / "corpus").iterdir()] == [".incomplete"]
    calls.fail_in = None
    record = read_record(run()["corpus"])
    assert record is not None
    assert record.figures["found"] == ["part"]
    assert record.resumed
    assert calls == ["preflight", "corpus", "corpus", "distill"]
    assert not list(tmp_path.glob("*/*.incomplete"))
    assert not list(tmp_path.glob("*/*.lock"))


def test_latest_links_follow_the_last_run(walk: Walk, tmp_path: Path) -> None:
    _, run = walk
    first, second = run(), run("loss=tv")
    link = tmp_path / "latest" / "distill"
    assert link.resolve() == second["distill"]
    run()
    assert link.resolve() == first["distill"]
    assert not link.readlink().is_absolute()


def test_a_stage_alone_needs_its_upstream_finished(walk: Walk) -> None:
    calls, run = walk
    with pytest.raises(ValueError, match=r"\['corpus'\], not finished.*stages=\[corpus,distill\]"):
        run("stages=[distill]")
    assert calls == []
    run("stages=[corpus]")
    assert run("stages=[distill]").keys() == {"corpus", "distill"}
    assert calls == ["corpus", "distill"]
