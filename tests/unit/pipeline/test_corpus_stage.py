"""Shards, accounting, the split, and the stage as a whole on a tiny target."""

import errno
import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from datasets import Dataset

from pipeline.corpus import read_corpus, split_corpus
from pipeline.corpus.accounting import Accounting
from pipeline.corpus.answers import plan_shards
from pipeline.corpus.prompts import make_prompt
from pipeline.corpus.shards import QUESTION_SCHEMA, ShardFolder
from pipeline.corpus.stage import run_corpus
from pipeline.schema import CorpusConfig
from tests.unit.pipeline.corpus_samples import make_context, tiny_config

ROW = {"slot": 1, "text": "x", "num_tokens": 3, "finish_reason": "stop"}
COLUMNS = [
    "prompt_id", "source", "prompt_token_ids", "response_token_ids", "finish_reason", "temperature", "seed", "topk_ids", "topk_logprobs",
]  # fmt: skip


def run(tmp_path: Path, name: str = "work", **corpus: object) -> tuple[Path, dict[str, object]]:
    folder = tmp_path / name
    figures = run_corpus(make_context(tiny_config(tmp_path, **corpus), folder))
    return folder, figures


def test_stage_writes_rows_and_accounts_for_each(tmp_path: Path) -> None:
    folder, figures = run(tmp_path)
    rows = read_corpus(folder)
    record = json.loads((folder / "corpus.json").read_text())
    assert rows.column_names == COLUMNS and len(rows) == 24 == record["written"]
    assert record["requested"] == record["written"] + sum(record["skipped"].values()) + sum(
        record["failed"].values()
    )
    assert record["finish_reason"] == {
        reason: rows["finish_reason"][:].count(reason) for reason in ("stop", "length")
    }
    assert (
        record["num_response_tokens"]
        == sum(map(len, rows["response_token_ids"]))
        == figures["num_response_tokens"]
    )
    assert record["num_truncated"] == figures["num_truncated"] > 0
    for row in rows:
        num = len(row["response_token_ids"])
        assert [len(x) for x in row["topk_ids"]] == [8] * num == [len(x) for x in row["topk_logprobs"]]
        assert row["topk_logprobs"][0] == sorted(row["topk_logprobs"][0], reverse=True)
        assert (row["response_token_ids"][-1] == 2) == (row["finish_reason"] == "stop")
    assert sorted(rows["temperature"]) == [0.0] * 12 + [1.0] * 12


def test_without_topk_the_columns_are_there_and_empty(tmp_path: Path) -> None:
    row = read_corpus(run(tmp_path, topk=0)[0])[0]
    assert row["topk_ids"] == [[]] * len(row["response_token_ids"]) == row["topk_logprobs"]


def test_finished_shards_are_kept_and_damaged_ones_made_again(tmp_path: Path) -> None:
    folder, _ = run(tmp_path)
    before = read_corpus(folder).to_list()
    shards = sorted((folder / "shards").glob("*.parquet"))
    kept, truncated, missing = shards[0], shards[1], shards[2]
    kept_time = kept.stat().st_mtime_ns
    truncated.write_bytes(truncated.read_bytes()[: truncated.stat().st_size // 2])
    missing.unlink()
    (folder / "shards" / "000099.tmp").write_bytes(b"half a shard")
    question_round = folder / "questions" / "000001.parquet"
    question_round.write_bytes(b"")
    run(tmp_path)
    assert read_corpus(folder).to_list() == before
    assert kept.stat().st_mtime_ns == kept_time and not list(folder.rglob("*.tmp"))


def test_a_shard_of_other_prompts_is_not_taken_for_its_own(tmp_path: Path) -> None:
    """speculators 1081: a file is keyed by what it was made from."""
    other, _ = run(tmp_path, "other", seed=5)
    folder, _ = run(tmp_path)
    before = read_corpus(folder).to_list()
    (folder / "shards" / "000000.parquet").write_bytes((other / "shards" / "000000.parquet").read_bytes())
    run(tmp_path)
    assert read_corpus(folder).to_list() == before


def test_unwritable_folder_is_named(tmp_path: Path) -> None:
    """speculators 743: writes that fail end the run, with the path."""
    work = tmp_path / "work"
    work.mkdir()
    (work / "questions").write_text("a file in the way")
    with pytest.raises(ValueError, match=r"work/questions.*finished shards are kept"):
        run(tmp_path)


def test_full_disk_is_named_and_leaves_no_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = ShardFolder(tmp_path / "s", QUESTION_SCHEMA)
    shards.write(0, [ROW])

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(pq, "write_table", full)
    with pytest.raises(ValueError, match=r"s/000001.parquet.*No space left"):
        shards.write(1, [ROW])
    assert shards.read(0) is not None and shards.read(1) is None


def test_shard_of_another_schema_does_not_count(tmp_path: Path) -> None:
    shards = ShardFolder(tmp_path, QUESTION_SCHEMA)
    pq.write_table(pq.read_table(_one_column(tmp_path / "other.parquet")), shards.path(0))
    assert shards.read(0) is None


def _one_column(path: Path) -> Path:
    Dataset.from_list([{"a": 1}]).to_parquet(str(path))
    return path


@pytest.mark.parametrize("lengths", [{"max_prompt_tokens": 500, "max_new_tokens": 100}, {"topk": 400}])
def test_sizes_beyond_the_target_are_refused(tmp_path: Path, lengths: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"corpus\.(max_prompt_tokens=500|topk=400)"):
        run(tmp_path, **lengths)


def test_reading_what_is_not_there_or_damaged(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no corpus shards"):
        read_corpus(tmp_path)
    folder, _ = run(tmp_path)
    (folder / "shards" / "000001.parquet").write_bytes(b"PAR1")
    with pytest.raises(ValueError, match=r"000001\.parquet.*damaged"):
        read_corpus(folder)


def test_plans_alternate_temperatures_and_sort_by_length() -> None:
    prompts = [make_prompt(range(1, 3 + i % 5 + i // 7), source="s", row=str(i)) for i in range(31)]
    corpus = CorpusConfig(temperatures=[0.0, 1.0, 0.5], shard_rows=4)
    plans = plan_shards(prompts, corpus)
    rows = [(p.row, plan.temperature) for plan in plans for p in plan.prompts]
    assert sorted(rows) == sorted((str(i), [0.0, 1.0, 0.5][i % 3]) for i in range(31))
    assert [plan.index for plan in plans] == list(range(len(plans))) and max(
        len(plan.prompts) for plan in plans
    ) == 4
    lengths = [len(p.token_ids) for plan in plans if plan.temperature == 0.5 for p in plan.prompts]
    assert lengths == sorted(lengths, reverse=True)


@pytest.mark.parametrize("fraction", [0.1, 0.5, 0.9])
def test_split_is_exact_complements_by_content(fraction: float) -> None:
    """speculators 868: no row in train and held out; both samples of one prompt on one side; added rows move none."""
    ids = [f"p{i // 2}" for i in range(2000)]
    rows = Dataset.from_dict({"prompt_id": ids, "n": list(range(2000))})
    train, held_out = split_corpus(rows, fraction)
    assert sorted([*train["n"], *held_out["n"]]) == list(range(2000))
    assert not set(train["prompt_id"]) & set(held_out["prompt_id"])
    assert len(held_out) / 2000 == pytest.approx(fraction, abs=0.05)
    more = Dataset.from_dict({"prompt_id": ["new", *ids[::-1]], "n": list(range(2001))})
    assert set(split_corpus(more, fraction)[1]["prompt_id"]) - {"new"} == set(held_out["prompt_id"])
    other, _ = split_corpus(rows, fraction, salt="other")
    assert other["prompt_id"][:] != train["prompt_id"][:]


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1])
def test_split_refuses_empty_sides(fraction: float) -> None:
    with pytest.raises(ValueError, match="held_out_fraction"):
        split_corpus(Dataset.from_dict({"prompt_id": ["a"]}), fraction)


def test_accounting_refuses_a_lost_row() -> None:
    accounting = Accounting(num_requested=2)
    accounting.write(finish_reason="stop", num_prompt_tokens=3, num_response_tokens=4)
    with pytest.raises(AssertionError, match="lost"):
        accounting.to_dict()
    accounting.fail("non_finite_logits", "row 1")
    assert accounting.to_dict()["failed"] == {"non_finite_logits": 1}
    assert accounting.to_dict()["examples"] == {"non_finite_logits": ["row 1"]}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("batch_size", 0), ("num_prompts", 0), ("num_prompts", None), ("topk", -1), ("temperatures", []), ("temperatures", [-1.0]),
        ("self_ask_top_p", 0.0), ("held_out_fraction", 1.0), ("max_questions_per_prompt", 0.5),
    ],
)  # fmt: skip
def test_settings_that_mean_nothing_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"corpus\.{field}="):
        CorpusConfig(**{field: value})  # type: ignore[arg-type]
