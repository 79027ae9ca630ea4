"""`make rank`: usable drafts measured side by side, the others with their reason; exit codes."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from distill.draft_init import draft_from_layers
from eval.config import BenchConfig, EvalConfig
from eval.draft_verdict import DraftVerdict
from eval.teacher_forcing import Draft
from pipeline.eval_rows import EvalRows
from pipeline.models import load_causal_lm, load_tokenizer, resolve_target
from pipeline.rank import main, rank
from pipeline.rank_candidates import Candidate, short_names
from pipeline.rank_measure import gammas_to_measure, measurable
from pipeline.rank_table import rank_table, sort_rows
from pipeline.schema import Config, PreflightConfig, TrackingConfig
from tests.conftest import ROOT
from tests.unit.pipeline import tiny_models
from tests.unit.pipeline.corpus_samples import tiny_config
from tests.unit.pipeline.trained_samples import finish_stages

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    config = tiny_config(tmp_path_factory.mktemp("rank") / "artifacts", num_prompts=40)
    config.corpus.held_out_fraction = 0.5
    config.eval = EvalConfig(num_bootstrap=20, num_viewer_prompts=1, decoded_tokens=6, viewer_gamma=2)
    config.bench = BenchConfig(num_prompts=2, max_new_tokens=6, num_bootstrap=20, backends=["native"], num_warmup_prompts=0)
    config.preflight = PreflightConfig(max_gamma=3, context_tokens=8, num_repeats=2)
    config.tracking = TrackingConfig(enabled=False)
    finish_stages(config)
    return config


@pytest.fixture(scope="module")
def folders(config: Config, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A draft from elsewhere, one with another tokenizer, one whose weights are gone, and one with hardly a context."""
    root, reference = tmp_path_factory.mktemp("drafts"), resolve_target(config)
    target = load_causal_lm(reference.path, "float32")
    for name in ("sibling", "broken", "short"):
        draft = draft_from_layers(target, [0, 2])
        if name == "short":
            draft.config.max_position_embeddings = 12
        draft.save_pretrained(root / name)
        load_tokenizer(reference.path).save_pretrained(root / name)
    (root / "broken" / "model.safetensors").unlink()
    tiny_models.save(root / "stranger", tiny_models.make_model(), tiny_models.make_tokenizer())
    shutil.copy(Path(reference.path) / "generation_config.json", root / "sibling")
    return {name: root / name for name in ("sibling", "broken", "stranger", "short")}


def test_usable_drafts_are_measured_and_the_others_say_why(
    config: Config, folders: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """vllm 42775; sglang 24051: another tokenizer of the same size was silently wrong.

    SpecForge 271; vllm 58080: a draft whose context ends early must not take the others' texts away, or the whole ranking down.
    """
    words = ["undistilled", "distilled", *map(str, folders.values()), "no/such/folder"]
    folder = rank(config, words)
    result = json.loads((folder / "rank.json").read_text())
    rows = {row["draft"]: row for row in result["drafts"]}
    assert set(rows) == {"undistilled", "distilled", "sibling", "broken", "stranger", "short", "folder"}
    usable = {name for name, row in rows.items() if row["compatible"]}
    assert usable == {"undistilled", "distilled", "sibling"}
    for name in usable:
        row = rows[name]
        assert {e["temperature"] for e in row["acceptance_rate"]} == {0.0, 1.0}
        assert all(0 <= e["value"] <= 1 for e in row["acceptance_rate"])
        assert row["measured_speedup"] > 0 and row["measured_gamma"] in (1, 2, 3)
        assert list(row["predicted_speedup_by_gamma"]) == ["1", "2", "3"]
        assert row["predicted_gamma"] in (0, 1, 2, 3) and row["cost_ratio"] > 0
        assert row["num_parameters"] > 0 and row["weights_mib"] > 0 and row["kv_mib_per_1000_tokens"] > 0
        assert row["verdict"].startswith(("pays", "does not pay"))
        clock = row["by_the_clock"]
        judged = [*clock["confirmed"], *clock["open"], *clock["refuted"]]
        assert sorted(map(str, judged)) == list(row["measured_speedup_by_gamma"])
    assert "tokenizer" in " ".join(rows["stranger"]["reasons"])
    assert "its context of 12 tokens holds 0 of the" in " ".join(rows["short"]["reasons"])
    assert all(rows[name]["reasons"] and "measured_speedup" not in rows[name] for name in rows.keys() - usable)
    speeds = [row["measured_speedup"] for row in result["drafts"][:3]]
    assert speeds == sorted(speeds, reverse=True)
    out = capsys.readouterr().out
    assert "no/such/folder" in out and "fastest first" in out
    assert (folder / "viewer.html").read_text().count("<article") == 3 * 2


def test_a_draft_that_the_engine_cannot_run_is_no_end_of_the_others(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    target = load_causal_lm(resolve_target(config).path, "float32")
    good, bad = (Candidate(name, name, draft=Draft(draft_from_layers(target, [0]))) for name in ("good", "bad"))
    assert bad.draft is not None
    monkeypatch.setattr(bad.draft.model, "_supports_attention_backend", False, raising=False)
    row = {"prompt_token_ids": [5, 6], "response_token_ids": [7]}
    assert measurable(config, target, [bad, good], EvalRows("", [row], {"a": [5, 6]})).keys() == {"good"}
    assert "attention interface" in bad.reasons[0] and good.compatible


def test_none_usable_is_refused_after_the_reasons_were_printed(
    config: Config, folders: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match="none of the drafts"):
        rank(config, [str(folders["stranger"])])
    assert "tokenizer" in capsys.readouterr().out


def test_users_mistakes(config: Config) -> None:
    with pytest.raises(ValueError, match="no drafts to rank"):
        rank(config, [])
    with pytest.raises(ValueError, match="named twice: a"):
        rank(config, ["a", "a"])
    fresh = tiny_config(Path(config.artifacts_dir), num_prompts=7)
    with pytest.raises(ValueError, match="distill stage is not finished"):
        rank(fresh, ["distilled"])


def test_words_with_an_equals_sign_are_settings(tmp_path: Path) -> None:
    words = ["+experiment=tiny", f"artifacts_dir={tmp_path}", "tracking=off"]
    with pytest.raises(ValueError, match="no drafts to rank"):
        main(words)
    assert not list(tmp_path.iterdir()), "no target is fetched for that"
    with pytest.raises(ValueError, match=r"distill stage is not finished"):
        main([*words, "undistilled"])
    with pytest.raises(ValueError, match="no_such_key"):
        main([*words, "no_such_key=1", "x"])


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["a/b", "c/d"], ["b", "d"]),
        (["x/draft", "y/draft/"], ["x/draft", "y/draft"]),
        (["runs/none"], ["runs/none"]),
        (["distilled", "org/distilled"], ["distilled", "org/distilled"]),
    ],
)
def test_drafts_get_the_shortest_names_that_tell_them_apart(paths: list[str], names: list[str]) -> None:
    assert short_names(paths) == names


def test_the_table_puts_the_fastest_first_and_unusable_ones_last() -> None:
    bad = {"draft": "bad", "compatible": False, "reasons": ["another [tokenizer]"], "warnings": []}
    good = [
        {
            "draft": name, "compatible": True, "reasons": [], "warnings": ["w"] if name == "b" else [],
            "num_parameters": 1e6, "weights_mib": 2.0, "kv_mib_per_1000_tokens": 0.5, "cost_ratio": 0.1,
            "acceptance_rate": [{"temperature": 0.0, "value": 0.5}], "predicted_speedup": 1.2, "predicted_gamma": 2,
            "measured_speedup": speed, "measured_low": speed - 0.1, "measured_high": speed + 0.1, "measured_gamma": 2,
            "block_efficiency": 1.5, "verdict": "pays", "by_the_clock": {"meaning": "confirmed at gamma 2"},
        }
        for name, speed in (("a", 1.05), ("b", 1.4))
    ]  # fmt: skip
    rows = sort_rows([bad, *good])
    assert [row["draft"] for row in rows] == ["b", "a", "bad"]
    table = rank_table(rows)
    assert list(table.columns[1].cells) == ["after export", "yes", "no"]
    assert "another \\[tokenizer]" in list(table.columns[-1].cells)[-1]


@pytest.mark.parametrize(
    ("paying", "best", "gammas"),
    [([], 0, [1, 2]), ([1, 2], 1, [1, 2, 3]), ([1, 2, 3, 4, 5], 2, [1, 2, 3, 5, 6]), ([*range(1, 9)], 8, [1, 7, 8])],
)
def test_both_sides_of_where_paying_ends_are_measured(paying: list[int], best: int, gammas: list[int]) -> None:
    assert gammas_to_measure(DraftVerdict({}, paying, best, 1.0), max_gamma=8) == gammas


def test_make_has_the_commands() -> None:
    text = (ROOT / "Makefile").read_text()
    for target in ("rank", "viewer", "spec-bench"):
        assert f"\n{target}: $(STAMP) ## " in text
