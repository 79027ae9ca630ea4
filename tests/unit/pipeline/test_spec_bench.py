"""Spec-Bench: the leaderboard's groups and table, and a command that goes on where it was stopped."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from eval.config import BenchConfig, EvalConfig
from pipeline.schema import Config, TrackingConfig
from pipeline.spec_bench import ROWS, main, run_spec_bench
from pipeline.spec_bench_table import group_of, leaderboard, leaderboard_markdown, leaderboard_table, way_name
from tests.conftest import ROOT
from tests.unit.pipeline.corpus_samples import tiny_config
from tests.unit.pipeline.trained_samples import finish_stages

torch.set_num_threads(1)
CATEGORIES = ("writing", "coding", "translation", "qa", "rag")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    root = tmp_path_factory.mktemp("spec")
    config = tiny_config(root / "artifacts", num_prompts=16)
    questions = root / "question.jsonl"
    rows = [
        {"question_id": i, "category": CATEGORIES[i % 5], "turns": [f"Question {i}?", "More?"]} for i in range(15)
    ]
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config.bench = BenchConfig(
        prompts=str(questions), num_prompts=6, max_new_tokens=5, gammas=[2], backends=["native"], num_bootstrap=20
    )
    config.eval = EvalConfig()
    config.tracking = TrackingConfig(enabled=False)
    finish_stages(config)
    return config


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / ROWS).read_text().splitlines()]


def test_it_measures_by_group_and_goes_on_where_it_was_stopped(
    config: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    config.bench.max_minutes = 1e-9
    with pytest.raises(ValueError, match="no prompt was measured"):
        run_spec_bench(config)
    config.bench.max_minutes = None
    folder = run_spec_bench(config)
    first = lines(folder)
    assert len(first) == 6
    # Groups take turns: MT-bench's many categories are one.
    assert [row["group"] for row in first[:4]] == ["MT-bench", "translation", "QA", "RAG"]
    for row in first:
        assert [(e["draft"], e["gamma"]) for e in row["conditions"]] == [("none", 0), ("undistilled", 2), ("distilled", 2)]
        assert all(e["seconds"] > 0 and 1 <= e["num_tokens"] <= 5 for e in row["conditions"])
    # A line that a kill cut short is measured again, and the others are not.
    text = (folder / ROWS).read_text()
    (folder / ROWS).write_text(text[: text.rindex('{"key"') + 30])
    config.bench.num_prompts = 8
    assert run_spec_bench(config) == folder
    again = lines(folder)
    assert again[:5] == first[:5]
    assert len(again) == 8 and again[5]["key"] == first[5]["key"]
    written = json.loads((folder / "spec_bench.json").read_text())
    assert written["settings"]["num_prompts"] == 8
    assert [row["draft"] for row in written["leaderboard"]] == ["none", "undistilled", "distilled"]
    assert "distilled (gamma 2)" in (folder / "table.md").read_text()
    assert "8 of 8 prompts" in capsys.readouterr().out


def rows_of(speeds: dict[str, float], groups: dict[str, int]) -> list[dict[str, Any]]:
    """Prompts on which each draft is as many times faster than plain decoding as `speeds` says."""
    return [
        {
            "key": f"{group}{i}", "category": group, "group": group,
            "conditions": [
                {"backend": "native", "draft": draft, "gamma": 0 if draft == "none" else 2, "gamma_policy": "fixed",
                 "seconds": (1 + i) / speed, "num_tokens": 10 * (1 + i), "num_forwards": 10 * (1 + i) / speed}
                for draft, speed in speeds.items()
            ],
        }
        for group, count in groups.items()
        for i in range(count)
    ]  # fmt: skip


def test_cells_are_ratios_of_sums() -> None:
    rows = rows_of({"none": 1.0, "distilled": 1.6}, {"RAG": 3, "QA": 2, "other": 1})
    rows[0]["conditions"][1]["seconds"] *= 2
    plain, distilled = leaderboard(rows, num_bootstrap=50)
    assert plain["is_baseline"] and plain["overall"]["speedup"] == 1.0
    assert list(distilled["groups"]) == ["QA", "RAG", "other"], "the leaderboard's columns first"
    assert distilled["groups"]["QA"]["speedup"] == pytest.approx(1.6)
    assert distilled["groups"]["RAG"]["speedup"] == pytest.approx(6 / ((2 * 1 + 2 + 3) / 1.6))
    assert distilled["groups"]["QA"]["tokens_per_forward"] == pytest.approx(1.6)
    assert distilled["overall"]["num_prompts"] == 6
    assert distilled["overall"]["low"] <= distilled["overall"]["speedup"] <= distilled["overall"]["high"]
    table = leaderboard_table([plain, distilled])
    assert [column.header for column in table.columns][1:4] == ["QA (2)", "RAG (3)", "other (1)"]
    assert leaderboard_markdown([plain, distilled]).count("\n") == 4


def test_the_strongest_plain_decoding_is_the_baseline() -> None:
    rows = rows_of({"none": 1.0, "x": 2.0}, {"QA": 2})
    for row in rows:
        row["conditions"].append({**row["conditions"][0], "backend": "hf_generate", "seconds": row["conditions"][0]["seconds"] / 1.25})
    slow, draft, strong = leaderboard(rows, num_bootstrap=10)
    assert strong["is_baseline"] and not slow["is_baseline"]
    assert draft["overall"]["speedup"] == pytest.approx(2.0 / 1.25)


def test_a_tree_is_called_by_its_name_and_older_rows_have_none() -> None:
    rows = rows_of({"none": 1.0, "distilled": 2.0, "medusa": 1.5}, {"QA": 2})
    for row in rows:
        row["conditions"][2]["tree"] = "3x2x1"
    assert [way_name(way) for way in leaderboard(rows, num_bootstrap=10)][1:] == [
        "distilled (gamma 2)", "medusa (tree 3x2x1)"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("category", "group"),
    [("writing", "MT-bench"), ("math", "MT-bench"), ("math_reasoning", "math"), ("rag", "RAG"), ("", "all"), ("law", "law")],
)
def test_categories_belong_to_the_leaderboards_columns(category: str, group: str) -> None:
    assert group_of(category) == group


def test_without_prompts_or_a_draft_it_is_refused(tmp_path: Path) -> None:
    words = ["+experiment=tiny", f"artifacts_dir={tmp_path}", "tracking=off"]
    with pytest.raises(ValueError, match=r"bench\.prompts=null.*make spec-bench PROMPTS=question\.jsonl"):
        main(words)
    with pytest.raises(ValueError, match=r"bench\.prompts='nowhere\.jsonl': no such file"):
        main([*words, "bench.prompts=nowhere.jsonl"])
    assert not list(tmp_path.iterdir()), "no target is fetched for that"
    questions = tmp_path / "q.jsonl"
    questions.write_text('{"turns": ["Hello?"]}\n')
    with pytest.raises(ValueError, match="not finished.*stages="):
        main([*words, f"bench.prompts={questions}"])


@pytest.mark.parametrize(("prompts", "said"), [("", False), ("my questions.jsonl", True)])
def test_make_names_the_prompts_only_where_there_are_some(prompts: str, said: bool) -> None:
    done = subprocess.run(
        ["make", "-n", "spec-bench", f"PROMPTS={prompts}"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert ("bench.prompts" in done.stdout) is said
    assert not said or f"'bench.prompts=\"{prompts}\"'" in done.stdout
