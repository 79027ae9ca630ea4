"""Shards, accounting, the split, and the stage as a whole on a tiny target."""

import errno
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from datasets import Dataset

from pipeline.corpus import read_corpus, split_corpus
from pipeline.corpus.accounting import Accounting
from pipeline.corpus.answer_folder import AnswerFolder
from pipeline.corpus.backends.base import EngineFailure, FinishedRow, Options
from pipeline.corpus.backends.native import NativeCorpusBackend
from pipeline.corpus.rows import Row
from pipeline.corpus.shards import QUESTION_SCHEMA, ShardFolder
from pipeline.corpus.stage import run_corpus
from pipeline.corpus_schema import CorpusConfig
from tests.unit.pipeline.corpus_contract import make_rows
from tests.unit.pipeline.corpus_samples import make_context, tiny_config

ROW = {"slot": 1, "text": "x", "num_tokens": 3, "finish_reason": "stop"}
COLUMNS = [
    "prompt_id", "source", "domain", "prompt_token_ids", "response_token_ids", "finish_reason", "temperature", "top_p", "seed",
    "topk_ids", "topk_logprobs",
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
    (folder / "shards" / "0123.99.tmp").write_bytes(b"half a shard")
    question_round = folder / "questions" / "000001.parquet"
    question_round.write_bytes(b"")
    run(tmp_path)
    assert read_corpus(folder).to_list() == before
    assert kept.stat().st_mtime_ns == kept_time and not list(folder.rglob("*.tmp"))


def test_a_shard_of_other_prompts_is_not_taken_for_its_own(tmp_path: Path) -> None:
    """speculators 1081: a file is keyed by what it was made from."""
    other, _ = run(tmp_path, "other", seed=5)
    folder, _ = run(tmp_path)
    before, record = read_corpus(folder).to_list(), (folder / "corpus.json").read_text()
    for file in (other / "shards").glob("*.parquet"):
        (folder / "shards" / file.name).write_bytes(file.read_bytes())
    run(tmp_path)
    assert read_corpus(folder).to_list() == before and (folder / "corpus.json").read_text() == record


def test_a_shard_that_repeats_rows_is_not_counted_twice(tmp_path: Path) -> None:
    folder, _ = run(tmp_path)
    before = read_corpus(folder).to_list()
    file = next((folder / "shards").glob("*.parquet"))
    (folder / "shards" / "ffffffffffffffff.parquet").write_bytes(file.read_bytes())
    run(tmp_path)
    assert read_corpus(folder).to_list() == before


def test_how_the_work_is_cut_changes_nothing(tmp_path: Path) -> None:
    """speculators 716: what is done is known by content, whatever the order and the batches were."""
    rows = read_corpus(run(tmp_path)[0]).to_list()
    assert read_corpus(run(tmp_path, "other", shard_rows=5)[0]).to_list() == rows
    first, second = ({f.name for f in (tmp_path / name / "shards").iterdir()} for name in ("work", "other"))
    assert len(second) == 5 and not first & second


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
    assert [file.name for file in shards.folder.iterdir()] == ["000000.parquet"], "half a shard takes room"


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
    (folder / "shards" / "0123456789abcdef.parquet").write_bytes(b"PAR1")
    with pytest.raises(ValueError, match=r"0123456789abcdef\.parquet.*damaged"):
        read_corpus(folder)


def test_a_shard_that_is_gone_is_missed(tmp_path: Path) -> None:
    """speculators 835's kind: fewer rows than were counted, and nothing said."""
    folder, _ = run(tmp_path)
    assert len(read_corpus(folder)) == 24
    next((folder / "shards").glob("*.parquet")).unlink()
    with pytest.raises(ValueError, match=r"holds 16 of the 24 rows.*delete this stage folder"):
        read_corpus(folder)


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


def test_accounting_refuses_a_lost_row(tmp_path: Path) -> None:
    row = make_rows([[1, 50, 51]])[0]
    answers = AnswerFolder(tmp_path)
    answers.write(
        [FinishedRow(row, [4, 5], "length"), FinishedRow(replace(row, seed=9), failure="non_finite_logits")]
    )
    accounting = Accounting(num_requested=3)
    accounting.count_shards(answers.files())
    with pytest.raises(AssertionError, match="lost"):
        accounting.to_dict()
    accounting.num_requested = 2
    record = accounting.to_dict()
    assert record["written"] == 1 and record["failed"] == {"non_finite_logits": 1}
    assert record["num_prompt_tokens"] == 3 and record["num_response_tokens"] == 2
    assert record["examples"] == {"non_finite_logits": ["test:0"]}


def test_corpora_of_the_first_version_can_be_read(tmp_path: Path) -> None:
    folder, _ = run(tmp_path)
    before = read_corpus(folder).to_list()
    for file in (folder / "shards").glob("*.parquet"):
        pq.write_table(pq.read_table(file).drop_columns(["domain", "top_p"]), file)
    assert read_corpus(folder).to_list() == before


def test_failed_rows_are_kept_and_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A row that came to nothing is accounted for in every later run on the same folder, and told (speculators 743)."""
    generate = NativeCorpusBackend.generate

    def failing(self: NativeCorpusBackend, rows: Iterator[Row], options: Options) -> Iterator[FinishedRow]:
        for number, finished in enumerate(generate(self, rows, options)):
            broken = options.topk and number % 5 == 0
            yield FinishedRow(finished.row, failure="non_finite_logits") if broken else finished

    monkeypatch.setattr(NativeCorpusBackend, "generate", failing)
    _, figures = run(tmp_path)
    assert figures["num_failed"] == 5 and figures["num_written"] == 19
    assert "rows failed: {'non_finite_logits': 5}; corpus.json names" in caplog.text
    monkeypatch.undo()
    assert run(tmp_path)[1]["num_failed"] == 5


def test_what_has_finished_is_on_disk_when_the_engine_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate = NativeCorpusBackend.generate

    def dying(self: NativeCorpusBackend, rows: Iterator[Row], options: Options) -> Iterator[FinishedRow]:
        for number, finished in enumerate(generate(self, rows, options)):
            if options.topk and number == 11:
                raise EngineFailure("gone")
            yield finished

    monkeypatch.setattr(NativeCorpusBackend, "generate", dying)
    with pytest.raises(EngineFailure, match="gone"):
        run(tmp_path)
    files = sorted((tmp_path / "work" / "shards").glob("*.parquet"))
    assert sum(pq.read_metadata(file).num_rows for file in files) == 11
    monkeypatch.undo()
    folder, _ = run(tmp_path)
    assert read_corpus(folder).to_list() == read_corpus(run(tmp_path, "undisturbed")[0]).to_list()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("backend", "tgi"), ("base_urls", ["http://x"]), ("engine_args", {"a": 1}), ("num_in_flight", 0),
        ("batch_size", 0), ("num_prompts", 0), ("num_prompts", None), ("topk", -1),
        ("samples_per_prompt", 0), ("prefix_tokens", 0), ("near_duplicate_jaccard", 0.0),
        ("self_ask_top_p", 0.0), ("held_out_fraction", 1.0), ("max_questions_per_prompt", 0.5),
    ],
)  # fmt: skip
def test_settings_that_mean_nothing_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"corpus\.{field}="):
        CorpusConfig(**{field: value})  # type: ignore[arg-type]
