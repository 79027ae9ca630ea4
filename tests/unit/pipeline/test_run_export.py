"""The export stage as a whole, on results that earlier stages could have left."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.context import StageContext
from pipeline.export import push_draft, run_export, summary_figures
from pipeline.models import ModelRef
from pipeline.schema import Config, TargetConfig
from pipeline.tracker import Tracker
from specdec_runtime.loading import load_draft
from tests.unit.pipeline.report_samples import acceptance_row, bench_row, make_report
from tests.unit.pipeline.tiny_models import make_model, save

ACCEPTANCE = [
    acceptance_row("undistilled", value=0.1),
    acceptance_row(value=0.7),
    acceptance_row(temperature=1.0, value=0.6),
    acceptance_row(temperature=1.0, sampler="greedy", value=0.5),
]
BENCH = [
    bench_row("none", gamma=0, speedup=1.0),
    bench_row(gamma=1, speedup=1.1),
    bench_row(gamma=3, speedup=1.4),
]


class RecordingTracker(Tracker):
    """Keeps what `log_draft` got."""

    def __init__(self) -> None:
        self.drafts: list[tuple[Path, str, dict[str, float]]] = []

    def log_draft(self, folder: Path, *, name: str, figures: Any) -> None:
        self.drafts.append((folder, name, dict(figures)))


@pytest.fixture
def context(tmp_path: Path) -> StageContext:
    torch.set_num_threads(1)
    target = save(tmp_path / "target", make_model(num_layers=3))
    inputs = {name: tmp_path / name / "fingerprint" for name in ("corpus", "distill", "eval", "bench")}
    for name, folder in inputs.items():
        folder.mkdir(parents=True)
        (folder / "stage.json").write_text(json.dumps({"seconds": 30.0, "stage": name}))
    make_model(seed=1).save_pretrained(inputs["distill"] / "draft")
    train = {"vocab_shortlist": [0, 1, 2, 7, 9], "num_steps": 40, "num_supervised_tokens": 999}
    (inputs["distill"] / "train.json").write_text(json.dumps(train))
    (inputs["corpus"] / "corpus.json").write_text(json.dumps({"num_response_tokens": 1234}))
    (inputs["eval"] / "acceptance.json").write_text(json.dumps({"acceptance_rate": ACCEPTANCE}))
    settings = {"machine": make_report()["machine"]}
    (inputs["bench"] / "bench.json").write_text(json.dumps({"bench": BENCH, "settings": settings}))
    work_dir = tmp_path / "export" / "abcdef.incomplete"
    work_dir.mkdir(parents=True)
    config = Config(target=TargetConfig(name="tiny", path=str(target), dtype="float32"))
    config.export.dtype = "float32"
    return StageContext(config, work_dir, inputs, RecordingTracker(), ModelRef(str(target), "tiny", "rev"))


def test_the_folder_is_complete_and_the_report_has_the_agreed_keys(context: StageContext) -> None:
    figures = run_export(context)
    names = {path.name for path in context.work_dir.iterdir()}
    starters = {"serve.sh", "sglang.sh", "tensorrt_llm.sh", "tensorrt_llm.yaml"}
    assert names == {
        "draft", "speculative_config.json", "assisted_generation.py", "report.json", *starters
    }  # fmt: skip
    report = json.loads((context.work_dir / "report.json").read_text())
    agreed = {"target", "draft", "machine", "corpus", "minutes", "acceptance_rate", "bench"}
    assert set(report) == agreed | {"prediction"}
    assert report["target"] == {"name": "tiny", "path": context.target.path}
    assert {"name", "path", "num_parameters", "num_layers", "hidden_size"} <= set(report["draft"])
    assert (context.work_dir / report["draft"]["path"] / "config.json").is_file()
    assert report["draft"]["num_parameters"] == sum(
        parameter.numel() for parameter in make_model().parameters()
    )
    assert report["corpus"] == {"num_response_tokens": 1234}
    assert report["minutes"] == {"corpus": 0.5, "distill": 0.5, "eval": 0.5, "bench": 0.5}
    assert report["acceptance_rate"] == ACCEPTANCE
    assert report["bench"] == BENCH
    assert figures["gamma"] == 3
    assert figures["draft_sample_method"] == "probabilistic"


@pytest.mark.parametrize(("revision", "line"), [(None, "hub_id=org/model"), ("v2", "hub_id=''")])
def test_an_ids_target_is_named_by_its_id_too(context: StageContext, revision: str | None, line: str) -> None:
    """The run reads it from the Hub's cache, whose place means nothing on another machine; an id alone gives no revision."""
    context.config.target.path, context.config.target.revision = "org/model", revision
    run_export(context)
    assert f"made_for={context.target.path} {line}\n" in (context.work_dir / "serve.sh").read_text()


def test_serving_choices_come_from_the_measurements(context: StageContext) -> None:
    run_export(context)
    settings = json.loads((context.work_dir / "speculative_config.json").read_text())
    assert settings["num_speculative_tokens"] == 3
    assert settings["draft_sample_method"] == "probabilistic"
    generation = json.loads((context.work_dir / "draft" / "generation_config.json").read_text())
    assert generation["num_assistant_tokens"] == 3
    assert "1.40x plain decoding" in (context.work_dir / "draft" / "README.md").read_text()


def test_provenance_is_what_the_native_runtime_reads(context: StageContext) -> None:
    run_export(context)
    model, vocab_ids = load_draft(context.work_dir / "draft", "float32")
    assert vocab_ids is not None
    assert vocab_ids.tolist() == [0, 1, 2, 7, 9]
    assert model.config.vocab_size == 96
    provenance = json.loads((context.work_dir / "draft" / "draftsmith.json").read_text())
    assert provenance["best_gamma"] == 3
    assert provenance["target"]["revision"] == "rev"
    assert provenance["train"] == {"num_steps": 40, "num_supervised_tokens": 999}


def test_nothing_names_the_unfinished_folder(context: StageContext) -> None:
    """It is renamed when the stage is done, and may be moved later."""
    run_export(context)
    for path in context.work_dir.rglob("*"):
        if path.is_file() and path.suffix != ".safetensors":
            assert ".incomplete" not in path.read_text(), path
    assert isinstance(context.tracker, RecordingTracker)
    ((folder, name, figures),) = context.tracker.drafts
    assert folder == context.work_dir.parent / "abcdef" / "draft"
    assert name == "tiny-draft"
    assert figures["walltime_speedup_t0"] == 1.4


def test_a_second_attempt_after_a_kill_gives_the_same_files(context: StageContext) -> None:
    run_export(context)
    first = {
        path.relative_to(context.work_dir): path.read_bytes()
        for path in context.work_dir.rglob("*")
        if path.is_file()
    }
    (context.work_dir / "draft" / "model.safetensors").write_bytes(b"cut off")
    run_export(context)
    assert {
        path.relative_to(context.work_dir): path.read_bytes()
        for path in context.work_dir.rglob("*")
        if path.is_file()
    } == first


def test_missing_result_names_the_stage(context: StageContext) -> None:
    (context.inputs["bench"] / "bench.json").unlink()
    with pytest.raises(ValueError, match=r"bench\.json is missing: run the stage bench again"):
        run_export(context)


def test_summary_figures_name_temperature_and_sampler() -> None:
    report = make_report(
        acceptance=ACCEPTANCE, bench=[*BENCH, bench_row(gamma=1, speedup=0.9, temperature=1.0)]
    )
    assert summary_figures(report) == {
        "num_parameters": 12_345_678.0,
        "acceptance_rate_t0_probabilistic": 0.7,
        "acceptance_rate_t1_probabilistic": 0.6,
        "acceptance_rate_t1_greedy": 0.5,
        "walltime_speedup_t0": 1.4,
        "block_efficiency_t0": 1.9,
        "walltime_speedup_t1": 0.9,
        "block_efficiency_t1": 1.9,
    }


def test_push_makes_a_private_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, dict[str, Any]]] = []

    class FakeApi:
        def create_repo(self, name: str, **kwargs: Any) -> Any:
            calls.append((name, kwargs))
            return type("Url", (), {"repo_id": f"me/{name}"})()

        def upload_folder(self, **kwargs: Any) -> None:
            calls.append(("upload", kwargs))

    monkeypatch.setattr("pipeline.export.HfApi", FakeApi)
    assert push_draft(tmp_path, name="tiny-draft") == "me/tiny-draft"
    assert calls == [
        ("tiny-draft", {"private": True, "exist_ok": True}),
        ("upload", {"repo_id": "me/tiny-draft", "folder_path": tmp_path}),
    ]
