"""The corpus report: right counts, a page that needs nothing else and lets no text become markup."""

import math
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from pipeline import corpus_report
from pipeline.corpus.report import write_corpus_report
from pipeline.corpus.report_counts import Shares, collect_statistics
from pipeline.corpus.report_figures import corpus_figures
from pipeline.corpus.shards import ANSWER_SCHEMA, write_table
from pipeline.corpus.stage import run_corpus
from pipeline.models import resolve_target
from pipeline.stages import input_revisions, stage_fingerprints
from pipeline.store import Store, fingerprint_of
from pipeline.tracker import Tracker
from tests.unit.pipeline.corpus_samples import make_context, tiny_config, tiny_tokenizer

HOSTILE = "<script>alert('x')</script> $x^2 & \"q\""


def corpus_row(number: int, **changes: object) -> dict[str, object]:
    ids = [5, 6, 7, 8, 9, number % 100]
    row = {
        "prompt_id": f"{number + 16:016x}" * 2, "source": "a.jsonl", "domain": "", "prompt_token_ids": [1, 2, 3], "response_token_ids": ids,
        "finish_reason": "stop", "temperature": 0.0, "top_p": 1.0, "seed": number,
        "topk_ids": [[1, 2]] * len(ids), "topk_logprobs": [[math.log(0.5), math.log(0.25)]] * len(ids),
    }  # fmt: skip
    return {**row, **changes}


def write_corpus(folder: Path, rows: list[dict[str, object]], per_shard: int = 4) -> Path:
    (folder / "shards").mkdir(parents=True)
    for start in range(0, len(rows), per_shard):
        table = pa.Table.from_pylist(rows[start : start + per_shard], schema=ANSWER_SCHEMA)
        write_table(folder / "shards" / f"{start:04d}.parquet", table)
    return folder


def shard_files(folder: Path) -> list[Path]:
    return sorted((folder / "shards").glob("*.parquet"))


def test_counts_are_those_of_the_rows(tmp_path: Path) -> None:
    rows = [corpus_row(i) for i in range(6)]
    rows += [corpus_row(0, seed=99, temperature=1.0, top_p=0.9, finish_reason="length", domain="code", response_token_ids=[4] * 6)]
    rows += [corpus_row(7, response_token_ids=rows[0]["response_token_ids"])]
    found = collect_statistics(shard_files(write_corpus(tmp_path / "c", rows)))
    assert (found.num_rows, found.num_prompts, found.num_equal_answers) == (8, 7, 1)
    assert found.copies == [6, 2, 0, 0, 0, 0, 0, 0]
    assert found.groups["sampling"].keys() == {"temperature 0", "temperature 1, top-p 0.9"}
    cut = found.groups["finish reason"]["length"]
    assert (cut.num_rows, cut.num_tokens, cut.num_cut) == (1, 6, 1)
    assert {name: group.num_rows for name, group in found.groups["domain"].items()} == {"(none)": 7, "code": 1}
    assert found.response_lengths == {6: 8} and found.prompt_lengths == {3: 8}
    assert found.topk == 2 and found.mass.num == 48 and found.mass.mean == pytest.approx(0.75, abs=1e-3)
    assert found.variety.num == 8 and found.variety.mean == pytest.approx((7 + 1 / 3) / 8)


def test_rows_are_counted_by_how_often_their_answer_occurs(tmp_path: Path) -> None:
    """Against counting the answers themselves; eight and more fall together."""
    times = [1, 1, 2, 3, 3, 8, 11]
    rows = [corpus_row(10 * i + j, response_token_ids=[i] * 6) for i, num in enumerate(times) for j in range(num)]
    found = collect_statistics(shard_files(write_corpus(tmp_path / "c", rows, per_shard=5)))
    assert found.copies == [2, 2, 6, 0, 0, 0, 0, 19] and sum(found.copies) == found.num_rows == sum(times)
    assert found.num_equal_answers == sum(num - 1 for num in times)


def test_samples_are_random_different_and_the_same_every_time(tmp_path: Path) -> None:
    rows = [corpus_row(i) for i in range(60)]
    chosen = [
        [row["seed"] for row in collect_statistics(shard_files(write_corpus(tmp_path / name, order, per_shard=size))).samples]
        for name, order, size in (("a", rows, 7), ("b", rows[::-1], 60))
    ]
    assert chosen[0] == chosen[1] and len(set(chosen[0])) == 20 and chosen[0] != sorted(chosen[0])


def test_histograms_of_shares_know_their_quantiles() -> None:
    shares = Shares()
    shares.add(np.linspace(0, 1, 10_001))
    assert shares.mean == pytest.approx(0.5) and shares.quantile(0.05) == pytest.approx(0.05, abs=2e-3)
    assert math.isnan(Shares().mean) and math.isnan(Shares().quantile(0.5))
    shares.add(np.array([1.0005]))
    assert shares.num == 10_002, "fp16 sums may pass 1"


def test_page_needs_nothing_else_and_escapes_all_text(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    ids = tokenizer.encode(HOSTILE, add_special_tokens=False)
    rows = [
        corpus_row(i, source=HOSTILE, domain=f"d{i}{HOSTILE}", prompt_token_ids=ids, response_token_ids=[*ids, 2],
                   topk_ids=[[]] * (len(ids) + 1), topk_logprobs=[[]] * (len(ids) + 1))
        for i in range(30)
    ]  # fmt: skip
    page = write_corpus_report(write_corpus(tmp_path / "c", rows), tokenizer).read_text()
    assert "<script" not in page and "&lt;script&gt;alert(&#x27;x&#x27;)" in page
    assert not re.search(r"(src|href)=['\"](?!data:)", page) and "http" not in page
    assert page.count("<details") == 20 and page.count("&lt;|im_end|&gt;</pre>") == 20, "special tokens are shown"
    assert page.count("data:image/png;base64,") == 8 and "probability of the" not in page, "no candidates are stored"
    assert "as far as it is" in page, "there is no corpus.json yet"


class RecordingTracker(Tracker):
    def __init__(self) -> None:
        self.names: list[str] = []

    def log_text(self, text: str, name: str) -> None:
        self.names.append(name)

    def log_figure(self, figure: object, name: str) -> None:
        self.names.append(name)


def test_stage_writes_and_logs_its_report(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, num_prompts=6)
    context = make_context(config, tmp_path / "work.incomplete")
    tracker = RecordingTracker()
    run_corpus(type(context)(config, context.work_dir, {}, tracker, context.target))
    page = (context.work_dir / "report.html").read_text()
    assert "<h1>Corpus work</h1>" in page
    assert "6 answers to 6 prompts" in page and "not written" in page and "skipped: question_cut" in page
    assert set(tracker.names) == {
        "report.html", "corpus_source.png", "corpus_domain.png", "corpus_sampling.png", "corpus_finish_reason.png",
        "corpus_duplicates.png", "corpus_prompt_length.png", "corpus_response_length.png", "corpus_topk_mass.png", "corpus_variety.png",
    }  # fmt: skip


def test_folder_without_shards_and_damaged_shards_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no corpus shards"):
        write_corpus_report(tmp_path, tiny_tokenizer())
    folder = write_corpus(tmp_path / "c", [corpus_row(0)])
    shard_files(folder)[0].write_bytes(b"PAR1")
    with pytest.raises(ValueError, match=r"0000\.parquet.*damaged"):
        write_corpus_report(folder, tiny_tokenizer())


def test_command_finds_the_corpus_of_its_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["+experiment=tiny", "tracking=off", f"artifacts_dir={tmp_path}"]
    with pytest.raises(ValueError, match="no corpus of this configuration yet"):
        corpus_report.main(words)
    config = corpus_report.compose_config(words)
    fingerprint = stage_fingerprints(config, input_revisions(config, resolve_target(config)))["corpus"]
    assert fingerprint != fingerprint_of({})
    folder = write_corpus(Store(tmp_path).work_dir("corpus", fingerprint), [corpus_row(i) for i in range(3)])
    corpus_report.main(words)
    assert (folder / "report.html").is_file() and str(folder) in capsys.readouterr().out


def test_names_with_dollars_are_no_formulas(tmp_path: Path) -> None:
    rows = [corpus_row(i, source=f"cost in $ or $x_{i}") for i in range(30)]
    figures = corpus_figures(collect_statistics(shard_files(write_corpus(tmp_path / "c", rows))))
    labels = [label.get_text() for label in figures["corpus_source"].axes[0].get_yticklabels()]
    assert len(labels) == 21 and "10 others" in labels and all(label.count(r"\$") == 2 for label in labels if "cost" in label)
    figures["corpus_source"].canvas.draw()  # type: ignore[attr-defined]
