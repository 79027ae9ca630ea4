"""Mixtures: exact shares, lazy reading, what their fingerprint follows, and the target's own questions among them."""

import json
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
from datasets import Dataset

from pipeline.corpus import sources as source_module
from pipeline.corpus.accounting import Accounting
from pipeline.corpus.mixture import PromptStream, check_sources, count_rows, sources_revision
from pipeline.corpus.prompts import Admission, Prompt
from pipeline.corpus.rows import make_prompt
from pipeline.corpus.stage import run_corpus
from pipeline.corpus_schema import CorpusConfig, SourceConfig
from tests.conftest import Composer
from tests.unit.pipeline.corpus_samples import make_context, tiny_config, tiny_tokenizer
from tests.unit.pipeline.corpus_sources import load, texts, write_jsonl


def questions(path: Path, name: str, num: int) -> str:
    return str(write_jsonl(path / f"{name}.jsonl", [{"text": f"{name} {i}"} for i in range(num)]))


def mixed(tmp_path: Path, sources: list[SourceConfig], **corpus: object) -> tuple[list[Prompt], PromptStream, Accounting]:
    accounting = Accounting()
    config = tiny_config(tmp_path, mixture=sources, **corpus)
    stream = PromptStream(config, tiny_tokenizer(), accounting)
    return list(stream), stream, accounting


def test_shares_of_a_mixture_are_exact_whatever_is_skipped(tmp_path: Path) -> None:
    rows = [{"text": ""} if i % 2 else {"text": f"b {i}"} for i in range(60)]
    sources = [
        SourceConfig(questions(tmp_path, "a", 60), weight=3.0, domain="code"),
        SourceConfig(str(write_jsonl(tmp_path / "b.jsonl", rows)), weight=1.0, domain="chat"),
    ]
    prompts, stream, accounting = mixed(tmp_path, sources, num_prompts=40)
    assert Counter((prompt.source, prompt.domain) for prompt in prompts) == {("a.jsonl", "code"): 30, ("b.jsonl", "chat"): 10}
    assert [prompt.source[0] for prompt in prompts[:8]] == ["a", "a", "b", "a", "a", "a", "b", "a"]
    assert [source["share"] for source in stream.describe()["sources"]] == [0.75, 0.25]
    assert accounting.num_requested == 40 + accounting.skipped["empty"]
    assert prompts == mixed(tmp_path, sources, num_prompts=40)[0]


def test_a_mixture_ends_with_its_first_source_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sources = [SourceConfig(questions(tmp_path, "a", 5)), SourceConfig(questions(tmp_path, "b", 50))]
    prompts, stream, _ = mixed(tmp_path, sources, num_prompts=40)
    assert Counter(prompt.source for prompt in prompts) == {"a.jsonl": 5, "b.jsonl": 5}
    assert stream.describe()["exhausted"] == "a.jsonl" and "a.jsonl has no more" in caplog.text


@pytest.fixture
def counted_reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of an endless source, counted as they are read."""
    reads: list[int] = []

    def endless(*args: object, **kwargs: object) -> Iterator[dict[str, object]]:
        while True:
            reads.append(1)
            yield {"text": f"question {len(reads)}"}

    monkeypatch.setattr(source_module, "read_rows", endless)
    return reads


def test_rows_are_read_as_they_are_asked_for(tmp_path: Path, counted_reads: list[int]) -> None:
    config = tiny_config(tmp_path, prompts="endless.jsonl", num_prompts=None)
    stream = iter(PromptStream(config, tiny_tokenizer(), Accounting()))
    assert len(list(islice(stream, 5))) == 5 and len(counted_reads) == 5
    config.corpus.num_prompts = 7
    counted_reads.clear()
    assert len(list(PromptStream(config, tiny_tokenizer(), Accounting()))) == 7 == len(counted_reads)


def test_memory_stays_flat_over_many_rows(tmp_path: Path, counted_reads: list[int]) -> None:
    """What grows is the table of seen prompts: at most 32 bytes each."""
    config = tiny_config(tmp_path, prompts="endless.jsonl", num_prompts=None)
    stream = iter(PromptStream(config, tiny_tokenizer(), Accounting()))
    for _ in islice(stream, 500):
        pass
    tracemalloc.start()
    for _ in islice(stream, 4000):
        pass
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert grown - 8 * len(counted_reads) < 4000 * 40 + 100_000


def test_sources_of_a_mixture_are_checked_and_counted(tmp_path: Path) -> None:
    good, bad = SourceConfig(questions(tmp_path, "a", 5)), SourceConfig(str(tmp_path / "none.jsonl"))
    with pytest.raises(ValueError, match=r"none\.jsonl.*no such file"):
        check_sources(CorpusConfig(mixture=[good, bad]))
    assert count_rows(CorpusConfig(mixture=[good, good], num_prompts=None)) == 10


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prompts": "a.jsonl", "mixture": [SourceConfig("b.jsonl")]}, "exclude each other"),
        ({"mixture": [SourceConfig(), SourceConfig()]}, "only one entry"),
        ({"mixture": [SourceConfig(), SourceConfig("b.jsonl")], "num_prompts": None}, "num_prompts=null"),
    ],
)
def test_mixtures_that_mean_nothing_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CorpusConfig(**settings)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="weight=0"):
        SourceConfig("a.jsonl", weight=0)


def test_a_mixture_is_set_from_the_command_line(make_config: Composer) -> None:
    words = "corpus.mixture=[{prompts: a.jsonl, weight: 2, domain: code}, {prompts: null}]"
    for option in ("corpus=self_asked", "corpus=prompts"):
        config = make_config(option, words)
        assert config.corpus.mixture == [SourceConfig("a.jsonl", 2.0, "code"), SourceConfig()] and config.corpus.prompts is None


def test_revision_follows_content_and_weights_not_places(tmp_path: Path) -> None:
    """speculators 1081: a corpus of other prompts is another corpus, a moved file is not."""
    first, second = tmp_path / "x", tmp_path / "y"
    first.mkdir(), second.mkdir()
    paths = [questions(folder, "a", 5) for folder in (first, second)]
    of = {path: sources_revision(CorpusConfig(prompts=path)) for path in paths}
    assert of[paths[0]] == of[paths[1]] is not None
    assert sources_revision(CorpusConfig(prompts=questions(first, "b", 6))) != of[paths[0]]
    weights = {sources_revision(CorpusConfig(mixture=[SourceConfig(paths[0], weight=w)])) for w in (1.0, 2.0)}
    assert len(weights) == 2 and sources_revision(CorpusConfig()) is None
    Dataset.from_list([{"text": "x"}]).save_to_disk(str(tmp_path / "d"))
    before = sources_revision(CorpusConfig(prompts=str(tmp_path / "d")))
    Dataset.from_list([{"text": "y"}]).save_to_disk(str(tmp_path / "d2"))
    for file in (tmp_path / "d2").iterdir():
        (tmp_path / "d" / file.name).write_bytes(file.read_bytes())
    assert sources_revision(CorpusConfig(prompts=str(tmp_path / "d"))) != before


def test_own_questions_in_a_mixture_are_asked_for_by_their_share(tmp_path: Path) -> None:
    asked: list[int] = []

    def ask(num_wanted: int, admission: Admission, domain: str) -> Iterator[Prompt]:
        asked.append(num_wanted)
        for number in range(num_wanted):
            accounting.num_requested += 1
            yield make_prompt([1, number], source="self_asked", row=str(number), domain=domain)

    accounting = Accounting()
    sources = [SourceConfig(questions(tmp_path, "a", 50)), SourceConfig(domain="own", weight=2.0)]
    stream = PromptStream(tiny_config(tmp_path, mixture=sources, num_prompts=20), tiny_tokenizer(), accounting, ask)
    counts = Counter(prompt.domain for prompt in stream)
    assert sum(counts.values()) == 20 == accounting.num_requested and [counts["own"]] == asked


@pytest.mark.slow
def test_stage_answers_a_mixture_with_several_samples(tmp_path: Path) -> None:
    sources = [SourceConfig(questions(tmp_path, "a", 20), domain="files"), SourceConfig(weight=2.0, domain="own")]
    config = tiny_config(tmp_path, mixture=sources, num_prompts=6, samples_per_prompt=2)
    folder = tmp_path / "work"
    run_corpus(make_context(config, folder))
    record = json.loads((folder / "corpus.json").read_text())
    assert [source["num_prompts"] for source in record["sources"]] == [2, 4]
    assert record["requested"] == record["written"] + record["num_skipped"] and record["written"] == 12
    page = (folder / "report.html").read_text()
    assert "12 answers to 6 prompts" in page and "files" in page and "self_asked" in page


def test_a_folder_of_files_is_streamed_as_a_dataset(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    questions(folder, "train", 4)
    prompts, _ = load(folder, tmp_path)
    assert [text.split("\n")[1] for text in texts(prompts)] == [f"train {i}<|im_end|>" for i in range(4)]
