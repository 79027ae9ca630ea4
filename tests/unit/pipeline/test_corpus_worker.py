"""A further worker: finds the folder of the run that it helps, and leaves a finished corpus alone."""

from pathlib import Path

import pytest

from pipeline.corpus.worker import help_out, join
from pipeline.runner import run_stages
from tests.unit.pipeline.corpus_samples import make_context, tiny_config


def test_nobody_to_help_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"incomplete: no such folder .* stages=\[corpus\]"):
        join(tiny_config(tmp_path), wait_s=0.2)


def test_a_finished_corpus_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tiny_config(tmp_path)
    config.stages, config.tracking.enabled = ["preflight", "corpus"], False
    folder = run_stages(config)["corpus"]
    before = {file: file.stat().st_mtime_ns for file in folder.rglob("*")}
    join(config)
    assert "the corpus is finished" in capsys.readouterr().out
    assert {file: file.stat().st_mtime_ns for file in folder.rglob("*")} == before


def test_a_folder_that_is_renamed_meanwhile_does_not_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = make_context(tiny_config(tmp_path), tmp_path / "work.incomplete")
    load = "pipeline.corpus.backends.load_causal_lm"
    real = __import__("pipeline.models", fromlist=["load_causal_lm"]).load_causal_lm

    def finish_meanwhile(*arguments: object) -> object:
        context.work_dir.rename(tmp_path / "work")
        return real(*arguments)

    monkeypatch.setattr(load, finish_meanwhile)
    help_out(context)
    assert not context.work_dir.exists()


def test_it_works_where_the_stage_works(tmp_path: Path) -> None:
    config = tiny_config(tmp_path)
    config.stages, config.tracking.enabled = ["corpus"], False
    folder = run_stages(config)["corpus"]
    folder.rename(folder.with_name(f"{folder.name}.incomplete"))
    unfinished = folder.with_name(f"{folder.name}.incomplete")
    for file in [unfinished / "corpus.json", unfinished / "stage.json", *(unfinished / "shards").iterdir()]:
        file.unlink()
    join(config)
    assert len(list((unfinished / "shards").iterdir())) == 3 and not (unfinished / "corpus.json").exists()
