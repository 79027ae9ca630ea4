"""draft.vocab_shortlist=auto: what it predicts, what it picks, and that a killed stage keeps to it."""

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from rich.console import Console

from distill.draft_init import frequent_token_ids
from eval.theory import StepTimes
from pipeline import shortlist as module
from pipeline import stage_distill
from pipeline.context import load_target
from pipeline.held_out import corpus_parts
from pipeline.schema import Config
from pipeline.shortlist import (
    best_outlook,
    choice_table,
    shortlist,
    size_outlooks,
    sizes_to_try,
    special_ids,
    times_of_chosen_head,
    with_chosen_shortlist,
)
from pipeline.stage_distill import run_distill
from pipeline.summary import summary_tags
from tests.unit.pipeline.corpus_samples import tiny_tokenizer
from tests.unit.pipeline.distill_samples import context_of, tiny_corpus

torch.set_num_threads(1)

TARGET_MS = (10.0, 10.0, 10.0)
NUM_IDS = 320


def times_of(*draft_ms: float) -> list[StepTimes]:
    return [StepTimes(ms, TARGET_MS, draft_first_ms=ms) for ms in draft_ms]


def test_the_sizes_double_up_to_the_whole_vocabulary() -> None:
    assert sizes_to_try(49152, 17) == [2048, 4096, 8192, 16384, 32768, 49152]
    assert sizes_to_try(4096, 17) == [2048, 4096]
    assert sizes_to_try(32000, 3000) == [4096, 8192, 16384, 32000]
    assert sizes_to_try(320, 3) == [320]


def test_the_prediction_is_the_formula_at_the_covered_share_of_the_acceptance() -> None:
    """(1 + a + a^2) T(1) / (2 T_draft + T(3)) and its sibling at gamma 1, a = .6 * coverage; the better gamma counts."""
    for row, (covered, ms) in zip(
        size_outlooks([8, 16], [0.5, 1.0], times_of(1.0, 4.0), expected_acceptance=0.6), [(0.5, 1.0), (1.0, 4.0)], strict=True
    ):
        a = 0.6 * covered
        by_gamma = {1: (1 + a) * 10 / (ms + 10), 2: (1 + a + a * a) * 10 / (2 * ms + 10)}
        assert row.acceptance_rate == pytest.approx(a)
        assert row.gamma == max(by_gamma, key=by_gamma.__getitem__)
        assert row.speedup == pytest.approx(by_gamma[row.gamma])


@pytest.mark.parametrize(
    ("coverage", "draft_ms", "expected"),
    [
        ([0.5, 0.9, 1.0], [1.0, 1.2, 4.0], 4096),  # most of the text at little cost
        ([0.2, 0.5, 1.0], [3.9, 3.95, 4.0], 8192),  # the head costs next to nothing
        ([0.98, 0.99, 1.0], [0.5, 2.0, 4.0], 2048),  # the head is what costs
        ([0.99, 0.995, 1.0], [1.0, 1.03, 1.06], 8192),  # the smallest is ahead by less than what decides
        ([0.99, 0.995, 1.0], [12.0, 14.0, 16.0], 2048),  # none pays: the least loss
    ],
)
def test_the_best_predicted_speedup_wins_and_ties_go_to_the_larger_head(
    coverage: list[float], draft_ms: list[float], expected: int
) -> None:
    outlooks = size_outlooks([2048, 4096, 8192], coverage, times_of(*draft_ms), expected_acceptance=0.6)
    assert best_outlook(outlooks).num_ids == expected


def fake_clock(monkeypatch: pytest.MonkeyPatch, ms_per_row: float) -> list[list[int | None]]:
    """Draft steps of 1 ms and `ms_per_row` for each row of the head; returns the heads of each call."""
    calls: list[list[int | None]] = []

    def measure(target: Any, draft: Any, heads: Sequence[torch.Tensor | None], **settings: Any) -> list[StepTimes]:
        assert settings == {"max_gamma": 2, "context_tokens": 16, "num_repeats": 3, "max_seconds": module.MAX_TIMING_SECONDS}
        calls.append([None if head is None else len(head) for head in heads])
        return times_of(*(1.0 + ms_per_row * (NUM_IDS if head is None else len(head)) for head in heads))

    monkeypatch.setattr(module, "measure_head_times", measure)
    monkeypatch.setattr(module, "SMALLEST_SIZE", 64)
    return calls


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, Path]:
    return tiny_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def auto(corpus: tuple[Config, Path], monkeypatch: pytest.MonkeyPatch) -> tuple[Config, Path]:
    config, _ = corpus
    monkeypatch.setattr(config.draft, "vocab_shortlist", "auto")
    for name, value in (("max_gamma", 2), ("context_tokens", 16), ("num_repeats", 3)):
        monkeypatch.setattr(config.preflight, name, value)
    return corpus


def test_coverage_is_counted_on_the_held_out_rows_with_the_ids_of_the_training_rows(
    auto: tuple[Config, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = fake_clock(monkeypatch, 0.0)
    context = context_of(auto, tmp_path / "work")
    parts, target = corpus_parts(context), load_target(context)
    chosen, choice = with_chosen_shortlist(context, target, parts)
    assert choice is not None
    assert calls == [[64, 128, 256, None]]
    tokens = np.concatenate([np.asarray(row["response_token_ids"]) for row in parts.validation])
    for row in choice["sizes"]:
        ids = frequent_token_ids(parts.train, row["num_ids"], module.load_tokenizer(context.target.path).all_special_ids)
        assert row["coverage"] == pytest.approx(np.isin(tokens, ids).mean())
    # Every head costs the same: the whole vocabulary, and no shortlist in the settings that training reads.
    assert choice["chosen"]["num_ids"] == NUM_IDS
    assert choice["vocab_shortlist"] is chosen.config.draft.vocab_shortlist is None
    assert not chosen.config.draft.has_own_head
    console = Console(width=160, record=True)
    console.print(choice_table(choice))
    text = console.export_text()
    assert all(word in text for word in ("coverage", "draft ms", "320", "1.300"))


def test_every_shortlist_has_what_ends_a_text_and_nothing_that_the_head_lacks(
    corpus: tuple[Config, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recipes add a pad token behind the vocabulary, and some targets end their turns with a token that is not marked special."""
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    assert tokenizer.pad_token_id == NUM_IDS
    monkeypatch.setattr(module, "load_tokenizer", lambda path, trust_remote_code: tokenizer)
    monkeypatch.setattr(module, "stop_ids", lambda target, tokenizer: frozenset({2, 319}))
    context = context_of(corpus, tmp_path / "work")
    monkeypatch.setattr(context.config.draft, "vocab_shortlist", 8)
    assert special_ids(context) == [0, 1, 2, 319]
    ids = shortlist(context, corpus_parts(context).train)
    assert ids is not None and len(ids) == 8
    assert set(special_ids(context)) <= set(ids) and max(ids) < NUM_IDS


def test_a_number_is_left_alone(corpus: tuple[Config, Path], tmp_path: Path) -> None:
    context = context_of(corpus, tmp_path / "work")
    assert with_chosen_shortlist(context, None, None) == (context, None)  # type: ignore[arg-type]


def test_a_killed_stage_goes_on_with_the_ids_that_it_chose(
    auto: tuple[Config, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = context_of(auto, tmp_path / "work")
    train = stage_distill.train_in_phases
    seen: list[Any] = []

    def killed(*args: Any, **kwargs: Any) -> None:
        seen.append(kwargs["vocab_ids"])
        raise KeyboardInterrupt

    fake_clock(monkeypatch, 0.1)
    monkeypatch.setattr(stage_distill, "train_in_phases", killed)
    with pytest.raises(KeyboardInterrupt):
        run_distill(context)
    again = fake_clock(monkeypatch, 0.0)  # with which the whole vocabulary would win
    monkeypatch.setattr(stage_distill, "train_in_phases", train)
    figures = run_distill(context)
    record = json.loads((context.work_dir / "train.json").read_text())
    assert again == []
    assert record["vocab_shortlist"] == seen[0]
    assert len(seen[0]) == figures["shortlist_num_ids"] == record["shortlist_choice"]["vocab_shortlist"] == 64
    assert record["has_own_head"]
    assert [row["num_ids"] for row in record["shortlist_choice"]["sizes"]] == [64, 128, 256, NUM_IDS]
    assert summary_tags(context.config, {"distill": context.work_dir})["draft"].endswith("64 ids")
    # Predictions of later stages go by the head that was chosen: 1 ms + 64 rows.
    times = times_of_chosen_head(StepTimes(33.0, TARGET_MS), context.work_dir)
    assert (times.draft_ms, times.target_ms) == (pytest.approx(7.4), TARGET_MS)


def test_ranked_ids_are_nested_shortlists() -> None:
    rows = Dataset.from_dict({"response_token_ids": [[7, 7, 7, 40, 40, 3], [40, 9, 9]]})
    ranked = module.rank_token_ids(rows, 50, [2, 1])
    assert sorted(ranked.tolist()) == list(range(50))
    assert ranked[:7].tolist() == [1, 2, 7, 40, 9, 3, 0]
    for size in (3, 5, 20, 50):
        assert sorted(ranked[:size].tolist()) == frequent_token_ids(rows, size, [1, 2])
    held_out = Dataset.from_dict({"response_token_ids": [[7, 9, 1], [49], []]})
    assert module.shortlist_coverage(ranked, held_out, [2, 3, 5, 50]) == [0.25, 0.5, 0.75, 1.0]
