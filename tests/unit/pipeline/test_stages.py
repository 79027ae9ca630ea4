"""The fingerprint of a stage covers what it reads, and nothing else."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest

from pipeline.models import ModelRef
from pipeline.schema import Config
from pipeline.stages import STAGES, config_subtree, input_revisions, load_function, stage_fingerprints
from pipeline.store import file_revision, fingerprint_of
from tests.conftest import Composer

TARGET = ModelRef(path="somewhere", name="target", revision="abc")


def fingerprints(config: Config, target: ModelRef = TARGET) -> dict[str, str]:
    return stage_fingerprints(config, input_revisions(config, target))


def changed(first: dict[str, str], second: dict[str, str]) -> set[str]:
    return {name for name in first if first[name] != second[name]}


@pytest.mark.parametrize(
    ("override", "stages_changed"),
    [
        ("corpus.seed=7", {"corpus", "distill", "eval", "bench", "export"}),
        ("corpus.max_new_tokens=7", {"preflight", "corpus", "distill", "eval", "bench", "export"}),
        ("corpus.held_out_fraction=0.3", {"distill", "eval", "bench", "export"}),
        ("loss=tv", {"distill", "eval", "bench", "export"}),
        ("train.learning_rate=0.1", {"distill", "eval", "bench", "export"}),
        ("train.eval_sampler=greedy", {"distill", "eval", "bench", "export"}),
        ("eval.num_bootstrap=7", {"eval", "export"}),
        ("runtime.gamma=auto", {"bench", "export"}),
        ("runtime.max_batch_size=3", {"preflight", "bench", "export"}),
        ("export.dtype=float16", {"export"}),
        ("preflight.num_repeats=7", {"preflight", "export"}),
        ("target.dtype=float16", {"preflight", "corpus", "distill", "eval", "bench", "export"}),
        ("artifacts_dir=elsewhere", set()),
        ("launch.engine=fsdp", set()),
        ("tracking=off", set()),
        ("tracking.uri=http://127.0.0.1:1", set()),
        ("stages=[corpus]", set()),
        ("gate.min_speedup=1.5", set()),
        ("target.name=other", {"export"}),
    ],
)
def test_a_setting_changes_just_the_stages_that_read_it(
    make_config: Composer, override: str, stages_changed: set[str]
) -> None:
    before, after = (
        fingerprints(make_config("+experiment=tiny")),
        fingerprints(make_config("+experiment=tiny", override)),
    )
    assert changed(before, after) == stages_changed


@pytest.mark.parametrize(
    ("override", "stages_changed"),
    [
        ("draft.expected_acceptance=0.7", {"distill", "eval", "bench", "export"}),
        ("preflight.num_repeats=7", {"preflight", "distill", "eval", "bench", "export"}),
    ],
)
def test_what_chooses_the_shortlist_counts_only_where_it_is_chosen(
    make_config: Composer, override: str, stages_changed: set[str]
) -> None:
    auto = ("+experiment=tiny", "draft.vocab_shortlist=auto")
    assert changed(fingerprints(make_config(*auto)), fingerprints(make_config(*auto, override))) == stages_changed
    fixed = ("+experiment=tiny", "draft.vocab_shortlist=64")
    assert "distill" not in changed(fingerprints(make_config(*fixed)), fingerprints(make_config(*fixed, override)))


@pytest.mark.parametrize(
    "override",
    [
        "loss.teacher=online",
        "train.on_policy.max_steps=5",
        "train.token_selection={keep_fraction: 0.5, reference_steps: 5}",
    ],
)
def test_what_costs_time_or_memory_changes_the_estimates(make_config: Composer, override: str) -> None:
    plain = fingerprints(make_config("+experiment=tiny"))
    assert "preflight" in changed(plain, fingerprints(make_config("+experiment=tiny", override)))
    off = ("train.on_policy.max_new_tokens=5", "train.max_sequence_tokens=99", "train.token_selection.reference_steps=5")
    assert "preflight" not in changed(plain, fingerprints(make_config("+experiment=tiny", *off)))


@pytest.mark.parametrize("value", ["null", "8192", "auto"])
def test_a_shortlist_is_a_number_nothing_or_auto(make_config: Composer, value: str) -> None:
    draft = make_config(f"draft.vocab_shortlist={value}").draft
    assert draft.vocab_shortlist == {"null": None, "8192": 8192}.get(value, value)
    assert draft.shortlist_size == (8192 if value == "8192" else None)


def test_another_target_content_changes_every_stage_and_its_place_none(make_config: Composer) -> None:
    config = make_config("+experiment=tiny")
    assert changed(fingerprints(config), fingerprints(config, replace(TARGET, revision="def"))) == {
        stage.name for stage in STAGES
    }
    assert not changed(fingerprints(config), fingerprints(config, replace(TARGET, path="moved")))


def test_prompts_count_by_content_and_not_by_place(make_config: Composer, tmp_path: Path) -> None:
    """A stale derived file was reused for another corpus (speculators 1081, SpecForge 602): the key is the content."""
    first, copy, other = tmp_path / "a.jsonl", tmp_path / "b.jsonl", tmp_path / "c.jsonl"
    first.write_text('{"text": "a"}\n')
    copy.write_text('{"text": "a"}\n')
    other.write_text('{"text": "b"}\n')
    found = [
        fingerprints(make_config("+experiment=tiny", "corpus=prompts", f"corpus.prompts={file}"))
        for file in (first, copy, other)
    ]
    assert not changed(found[0], found[1])
    assert changed(found[0], found[2]) == {"corpus", "distill", "eval", "bench", "export"}
    assert file_revision(first) == file_revision(copy) != file_revision(other)


def test_fingerprint_does_not_depend_on_the_order_of_keys() -> None:
    assert fingerprint_of({"a": 1, "b": [1.0, None]}) == fingerprint_of({"b": [1.0, None], "a": 1})
    assert fingerprint_of({"a": 1}) != fingerprint_of({"a": 2})


def test_a_setting_that_came_later_leaves_older_work_known(make_config: Composer) -> None:
    """Folders that were finished before draft.num_heads and bench.trees existed are still found."""
    values = asdict(make_config("+experiment=tiny"))
    assert "draft.num_heads" not in config_subtree(values, ("draft",))
    assert "draft.path" not in config_subtree(values, ("draft",))
    assert config_subtree(values, ("draft",))["draft.keep_layers"] is None
    heads = asdict(make_config("+experiment=tiny_medusa"))
    assert config_subtree(heads, ("draft",))["draft.num_heads"] == 2
    assert "bench.trees" not in config_subtree(values, ("bench",))
    assert "bench.medusa_heads" not in config_subtree(values, ("bench",))
    assert config_subtree(values, ("bench",))["bench.ngram_gammas"] == []
    trees = asdict(make_config("+experiment=tiny", "bench.trees=[3x2x1,binary2,[-1,-1,0]]"))
    assert config_subtree(trees, ("bench",))["bench.trees"] == ["3x2x1", "binary2", [-1, -1, 0]]


def test_every_stage_function_exists() -> None:
    for stage in STAGES:
        assert callable(load_function(stage.function))


def test_stages_are_listed_after_their_upstream() -> None:
    seen: set[str] = set()
    for stage in STAGES:
        assert set(stage.upstream) <= seen
        seen.add(stage.name)
