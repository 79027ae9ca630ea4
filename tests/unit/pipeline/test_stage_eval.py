"""The eval stage on a tiny target: what it writes, its figures, the viewer, prompts of a file."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from matplotlib.figure import Figure

from eval.config import EvalConfig, WarperConfig
from pipeline.context import StageContext
from pipeline.drafts import load_drafts
from pipeline.models import load_tokenizer, resolve_target
from pipeline.stage_eval import run_eval
from pipeline.tracker import Tracker
from pipeline.viewer import prompt_text
from tests.conftest import Composer
from tests.unit.pipeline.corpus_samples import tiny_config, tiny_tokenizer
from tests.unit.pipeline.trained_samples import finish_stages

torch.set_num_threads(1)


class Kept(Tracker):
    """Keeps what was logged."""

    def __init__(self) -> None:
        self.figures: list[str] = []
        self.texts: dict[str, str] = {}

    def log_figure(self, figure: Figure, name: str) -> None:
        figure.canvas.draw() if hasattr(figure.canvas, "draw") else None
        self.figures.append(name)

    def log_text(self, text: str, name: str) -> None:
        self.texts[name] = text


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> StageContext:
    root = tmp_path_factory.mktemp("eval")
    config = tiny_config(root / "artifacts", num_prompts=40)
    config.corpus.held_out_fraction = 0.5
    config.eval = EvalConfig(
        num_bootstrap=20, max_gamma=3, num_decoded_prompts=3, decoded_tokens=8, num_viewer_prompts=2,
        viewer_gamma=2, warpers=[WarperConfig(top_p=0.5)],
    )  # fmt: skip
    folders = finish_stages(config)
    work_dir = root / "work"
    work_dir.mkdir()
    return StageContext(config, work_dir, folders, Kept(), resolve_target(config))


@pytest.fixture(scope="module")
def result(context: StageContext) -> dict[str, list[dict[str, object]]]:
    figures = run_eval(context)
    assert set(figures) == {
        f"acceptance_rate_{draft}_t{t}_{sampler}"
        for draft in ("undistilled", "distilled")
        for t in (0, 1)
        for sampler in ("probabilistic", "greedy")
    }
    loaded: dict[str, list[dict[str, object]]] = json.loads((context.work_dir / "acceptance.json").read_text())
    return loaded


def test_the_report_has_every_breakdown(result: dict[str, list[dict[str, object]]]) -> None:
    assert len(result["acceptance_rate"]) == 8
    assert all(0 <= row["low"] <= row["value"] <= row["high"] <= 1 for row in result["acceptance_rate"])  # type: ignore[operator]
    assert {row["warper"] for row in result["acceptance_rate"]} == {"none"}
    assert [(row["temperature"], row["warper"]) for row in result["by_warper"]] == [(1.0, "top_p=0.5")] * 4
    assert len(result["distillation_gain"]) == 4
    for entry in result["breakdown"]:
        assert entry["by_domain"] and entry["by_position"] and entry["by_entropy"] and entry["by_confidence"]
    for entry in result["rounds"]:
        assert list(entry["tau"]) == ["1", "2", "3"]  # type: ignore[call-overload]
        assert all(1 <= tau["value"] <= 1 + int(g) for g, tau in entry["tau"].items())  # type: ignore[attr-defined]


def test_real_decoding_stands_beside_the_text(result: dict[str, list[dict[str, object]]]) -> None:
    assert [(row["draft"], row["temperature"]) for row in result["decoded"]] == [
        (draft, t) for t in (0.0, 1.0) for draft in ("undistilled", "distilled")
    ]
    for row in result["decoded"]:
        assert row["num_prompts"] == 3 and row["gamma"] == 3
        assert {"acceptance_rate", "judged_acceptance", "block_efficiency"} <= row["from_text"].keys()  # type: ignore[attr-defined]
        assert isinstance(row["agrees"], bool)


def test_figures_and_the_viewer_are_logged(context: StageContext, result: dict[str, list[dict[str, object]]]) -> None:
    tracker = context.tracker
    assert isinstance(tracker, Kept)
    assert tracker.figures == ["acceptance.png"] + [
        f"acceptance_{name}_t{t}.png"
        for t in (0, 1)
        for name in ("by_domain", "by_position", "by_entropy", "calibration", "tau")
    ]
    page = (context.work_dir / "viewer.html").read_text(encoding="utf-8")
    assert tracker.texts == {"viewer.html": page}
    assert page.count("<section>") == 2 and page.count("<article") == 2 * 2 * 2


def test_prompts_of_a_file_are_answered_by_the_target(context: StageContext, tmp_path: Path) -> None:
    prompts = tmp_path / "q.jsonl"
    rows = [{"question_id": i, "category": "ab"[i % 2], "turns": [f"Question {i}?", "And?"]} for i in range(6)]
    prompts.write_text("\n".join(json.dumps(row) for row in rows))
    settings = replace(
        context.config.eval, prompts=str(prompts), num_prompts=5, max_new_tokens=8, num_decoded_prompts=0,
        num_viewer_prompts=0, warpers=[],
    )  # fmt: skip
    config = replace(context.config, eval=settings)
    run_eval(StageContext(config, tmp_path, context.inputs, Tracker(), context.target))
    written = json.loads((tmp_path / "acceptance.json").read_text())
    assert written["measured_on"] == "q.jsonl"
    assert {row["num_prompts"] for row in written["acceptance_rate"]} == {5}
    assert all(row["rows_matched"] for row in written["acceptance_rate"])
    assert written["breakdown"][0]["by_domain"].keys() == {"a", "b"}
    assert written["decoded"] == []
    assert not (tmp_path / "viewer.html").exists()


def test_warpers_come_from_the_command_line(make_config: Composer) -> None:
    settings = make_config("eval.warpers=[{top_p: 0.9},{top_k: 20}]").eval
    assert [(w.top_p, w.top_k) for w in settings.warpers] == [(0.9, None), (1.0, 20)]
    with pytest.raises(Exception, match="max_gamma=0"):
        make_config("eval.max_gamma=0")


def test_a_prompt_is_shown_without_its_template(context: StageContext) -> None:
    tokenizer = load_tokenizer(context.target.path)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why is it so?"}]
    ids = tiny_tokenizer().apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert prompt_text(ids, tokenizer) == "Why is it so?"
    plain = tokenizer("Once upon a time", add_special_tokens=False)["input_ids"]
    assert prompt_text(plain, tokenizer) == "Once upon a time"


def test_a_draft_that_was_damaged_since_is_named_with_the_way_out(context: StageContext, tmp_path: Path) -> None:
    """A finished folder is trusted by its name; what was cut or edited in it later is found when it is read."""
    distill = tmp_path / "distill" / "0123456789ab"
    shutil.copytree(context.inputs["distill"], distill)
    damaged = replace(context, inputs={**context.inputs, "distill": distill})
    weights = distill / "draft" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"the distilled draft=.*damaged(.|\n)*Run the stage distill again"):
        load_drafts(damaged)
    (distill / "train.json").write_text("{")
    with pytest.raises(ValueError, match=r"train\.json is damaged: run the stage distill again"):
        load_drafts(damaged)


def test_answers_of_one_token_are_measured(tmp_path: Path) -> None:
    """A target that answers in one token leaves nothing to propose, and this showed after the training only."""
    config = tiny_config(tmp_path / "artifacts", num_prompts=20, max_new_tokens=1)
    config.corpus.held_out_fraction = 0.5
    config.eval = EvalConfig(num_bootstrap=20, max_gamma=2, num_decoded_prompts=2, decoded_tokens=1, num_viewer_prompts=1)
    run_eval(StageContext(config, tmp_path, finish_stages(config), Tracker(), resolve_target(config)))
    result = json.loads((tmp_path / "acceptance.json").read_text())
    assert all(0 <= row["value"] <= 1 for row in result["acceptance_rate"])
    assert all(tau["value"] == 1 for row in result["rounds"] for tau in row["tau"].values())
    assert len(result["decoded"]) == 4
    for row in result["decoded"]:
        assert row["judged_acceptance"] is row["from_text"]["judged_acceptance"] is None
        assert row["block_efficiency"]["value"] == row["from_text"]["block_efficiency"]["value"] == 1
        assert row["agrees"] is None
