"""Prompts: sources, columns, roles, templates, questions that the target invents, duplicates."""

import copy
import csv
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict
from transformers import PreTrainedTokenizerFast

from pipeline.corpus import check_prompts
from pipeline.corpus.accounting import Accounting
from pipeline.corpus.chat import stop_ids, user_turn
from pipeline.corpus.duplicates import DuplicateFilter
from pipeline.corpus.generate import TransformersGenerator
from pipeline.corpus.progress import CorpusProgress
from pipeline.corpus.prompts import Prompt, file_prompts
from pipeline.corpus.questions import QuestionMaker
from pipeline.schema import CorpusConfig
from tests.unit.pipeline.corpus_samples import tiny_config, tiny_model, tiny_tokenizer


def with_template(template: str | None) -> PreTrainedTokenizerFast:
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.chat_template = template
    return tokenizer


def load(path: Path | str, tmp_path: Path, **corpus: object) -> tuple[list[Prompt], Accounting]:
    accounting = Accounting()
    config = tiny_config(tmp_path, prompts=str(path), **corpus)
    return file_prompts(config, tiny_tokenizer(), accounting), accounting


def texts(prompts: list[Prompt]) -> list[str]:
    return [tiny_tokenizer().decode(prompt.token_ids) for prompt in prompts]


def chat(text: str) -> str:
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


def write_jsonl(path: Path, rows: list[object]) -> Path:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


def test_every_kind_of_source_gives_the_same_prompts(tmp_path: Path) -> None:
    questions = ["How are you?", "Wie geht's, „Öde“?"]
    rows = [{"id": str(i), "question": text} for i, text in enumerate(questions)]
    write_jsonl(tmp_path / "a.jsonl", list(rows))
    (tmp_path / "b.json").write_text(json.dumps(rows))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "c.parquet")
    with (tmp_path / "d.csv").open("w", newline="") as stream:
        writer = csv.DictWriter(stream, ["id", "question"])
        writer.writeheader()
        writer.writerows(rows)
    Dataset.from_list(rows).save_to_disk(str(tmp_path / "e"))
    DatasetDict({"train": Dataset.from_list(rows)}).save_to_disk(str(tmp_path / "f"))
    for name in ("a.jsonl", "b.json", "c.parquet", "d.csv", "e", "f"):
        prompts, accounting = load(tmp_path / name, tmp_path)
        assert texts(prompts) == [chat(text) for text in questions], name
        assert accounting.num_requested == 2
    assert {prompt.source for prompt in prompts} == {"f"}


def test_rows_that_cannot_be_used_are_counted_and_named(tmp_path: Path) -> None:
    """speculators 801: one bad row must not end the run."""
    user = {"role": "user", "content": "Hi there"}
    rows: list[object] = [
        {"messages": [user]},
        {"messages": [{"role": "wizard", "content": "x"}, user]},
        {"messages": [user, {"role": "assistant", "content": "old answer"}]},
        {"messages": []},
        {"messages": [{"role": "user", "content": "  "}]},
        {"messages": [{"role": "user", "content": "word " * 400}]},
        "{not json",
        {"messages": 7},
        {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
        {"messages": [{"role": "developer", "content": "the tiny template refuses this role"}, user]},
        {"messages": None},
        {
            "messages": [
                {"from": "system", "value": "Be brief"},
                {"from": "human", "value": "Hello"},
                {"from": "gpt", "value": "Yo"},
            ]
        },
        {
            "messages": [
                user,
                {"role": "assistant", "content": "old"},
                {"role": "user", "content": "And now?"},
            ]
        },
    ]
    prompts, accounting = load(write_jsonl(tmp_path / "p.jsonl", rows), tmp_path)
    assert dict(accounting.skipped) == {
        "unknown_role": 1,
        "duplicate": 1,
        "no_user_turn": 1,
        "empty": 2,
        "prompt_too_long": 1,
        "bad_json": 1,
        "not_text_or_messages": 1,
        "content_not_text": 1,
        "template_error": 1,
    }
    assert accounting.examples["unknown_role"] == ["p.jsonl:1"]
    assert accounting.num_requested == len(rows) == len(prompts) + accounting.skipped.total()
    assert (
        texts(prompts)[1].startswith("<|im_start|>system\nBe brief<|im_end|>")
        and "Yo" not in texts(prompts)[1]
    )
    assert "old" in texts(prompts)[2], "earlier turns stay as context"


def test_num_prompts_stops_reading_and_null_takes_all(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "p.jsonl", [{"text": f"question {i}"} for i in range(30)])
    assert len(load(path, tmp_path, num_prompts=5)[0]) == 5
    assert len(load(path, tmp_path, num_prompts=None)[0]) == 30


def test_prompt_ids_are_hashes_of_the_ids(tmp_path: Path) -> None:
    """speculators 716: stable content ids, whatever the file, the order and the temperature."""
    forth = load(write_jsonl(tmp_path / "a.jsonl", [{"text": "one"}, {"text": "two"}]), tmp_path)[0]
    back = load(
        write_jsonl(tmp_path / "b.jsonl", [{"text": "two"}, {"text": "one"}]), tmp_path, temperatures=[0.7]
    )[0]
    assert [p.prompt_id for p in forth] == [p.prompt_id for p in reversed(back)]
    assert forth[0].prompt_id != forth[1].prompt_id


@pytest.mark.parametrize(
    ("name", "content", "settings", "message"),
    [
        ("p.jsonl", "", {}, "no rows"),
        ("p.jsonl", "not json\n", {}, "no rows"),
        ("p.csv", "question\n", {}, "no rows"),
        ("p.jsonl", '{"a": 1, "b": "x"}', {}, r"\['a', 'b'\]"),
        (
            "p.jsonl",
            '{"a": 1, "text": "x"}',
            {"prompts_column": "txt"},
            r"prompts_column='txt'.*\['a', 'text'\]",
        ),
        ("p.txt", "hello", {}, "unknown kind of file"),
        ("p.parquet", "PAR1 no", {}, "not a readable Parquet"),
        (None, "", {}, "no such file"),
        (None, "", {"prompts": " "}, r"corpus\.prompts is empty"),
    ],
)
def test_bad_files_are_refused_by_name(
    tmp_path: Path, name: str | None, content: str, settings: dict[str, object], message: str
) -> None:
    path = tmp_path / (name or "missing.jsonl")
    if name is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=message):
        check_prompts(tiny_config(tmp_path, **{"prompts": str(path), **settings}), tiny_tokenizer())


def test_datasets_that_cannot_be_had_are_refused(tmp_path: Path) -> None:
    Dataset.from_list([{"text": "x"}]).save_to_disk(str(tmp_path / "d"))
    DatasetDict({"train": Dataset.from_list([{"text": "x"}])}).save_to_disk(str(tmp_path / "dict"))
    with pytest.raises(ValueError, match=r"prompts_split='test'.*\['train'\]"):
        check_prompts(
            tiny_config(tmp_path, prompts=str(tmp_path / "dict"), prompts_split="test"), tiny_tokenizer()
        )
    with pytest.raises(ValueError, match="neither a file nor a dataset"):
        check_prompts(tiny_config(tmp_path, prompts=str(tmp_path / "nothing" / "here")), tiny_tokenizer())


def test_all_rows_skipped_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none of its 2 rows.*'empty': 2"):
        load(write_jsonl(tmp_path / "p.jsonl", [{"text": ""}, {"text": " "}]), tmp_path)


def test_chat_needs_a_template_and_a_base_model_needs_prompts(tmp_path: Path) -> None:
    config = tiny_config(tmp_path)
    with pytest.raises(ValueError, match=r"target\.chat=true.*chat template"):
        check_prompts(config, with_template(None))
    config.target.chat = False
    with pytest.raises(ValueError, match=r"target\.chat=false.*corpus\.prompts"):
        check_prompts(config, tiny_tokenizer())


def test_base_model_gets_the_bare_text(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, prompts=str(write_jsonl(tmp_path / "p.jsonl", [{"text": "Once upon"}])))
    config.target.chat = False
    prompts = file_prompts(config, with_template(None), Accounting())
    assert texts(prompts) == ["Once upon"]


LLAMA2_LIKE = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% endif %}{% endfor %}"
)


def test_user_turn_is_cut_out_of_any_template() -> None:
    model = tiny_model()
    turn = user_turn(tiny_tokenizer(), model, "Be brief")
    assert turn.prefix == "<|im_start|>system\nBe brief<|im_end|>\n<|im_start|>user\n"
    assert turn.suffix == "<|im_end|>\n" and turn.stop_token_ids == {2}
    plain = user_turn(with_template(LLAMA2_LIKE), model, None)
    assert (plain.prefix, plain.suffix) == ("[INST] ", " [/INST]") and plain.stop_token_ids == {2}
    with pytest.raises(ValueError, match="where the user's words go"):
        user_turn(with_template("{{ 'fixed text' }}"), model, None)
    with pytest.raises(ValueError, match="refuses"):
        user_turn(with_template("{{ raise_exception('no') }}"), model, None)


def test_a_turn_may_end_with_another_token_than_the_text() -> None:
    template = "{% for m in messages %}<|im_start|>{{ m.content }}<|endoftext|>{% endfor %}"
    assert user_turn(with_template(template), tiny_model(), None).stop_token_ids == {0, 2}
    assert stop_ids(tiny_model(), tiny_tokenizer()) == {2}


def make_questions(tmp_path: Path, **settings: object) -> tuple[list[Prompt], Accounting]:
    corpus = CorpusConfig(**{"num_prompts": 12, "batch_size": 8, **settings})  # type: ignore[arg-type]
    accounting = Accounting()
    maker = QuestionMaker(
        corpus, tiny_tokenizer(), tiny_model(), TransformersGenerator(tiny_model(), batch_size=8)
    )
    return maker.make(tmp_path / "questions", accounting, CorpusProgress()), accounting


def test_questions_come_from_the_template_and_are_accounted_for(tmp_path: Path) -> None:
    prompts, accounting = make_questions(tmp_path, question_starters=["What", "Why"])
    assert len(prompts) == 12 == len({prompt.prompt_id for prompt in prompts})
    for text in texts(prompts):
        assert text.startswith(("<|im_start|>user\nWhat", "<|im_start|>user\nWhy"))
        assert text.endswith("<|im_end|>\n<|im_start|>assistant\n")
    assert accounting.num_requested == 12 + accounting.skipped.total()
    assert accounting.skipped["question_cut"] > 0


def test_questions_are_the_same_again_and_differ_by_seed(tmp_path: Path) -> None:
    first = make_questions(tmp_path / "a")[0]
    assert first == make_questions(tmp_path / "b")[0]
    assert first == make_questions(tmp_path / "a")[0], "read back from finished rounds"
    assert first != make_questions(tmp_path / "c", seed=1)[0]


def test_topics_fill_the_system_prompts() -> None:
    with pytest.raises(ValueError, match="go together"):
        CorpusConfig(topics=["cooking"])
    with pytest.raises(ValueError, match="go together"):
        CorpusConfig(system_prompts=["About {topic}"])
    maker = QuestionMaker(
        CorpusConfig(system_prompts=["Ask about {topic}."], topics=["tea", "sea"]),
        tiny_tokenizer(),
        tiny_model(),
        TransformersGenerator(tiny_model(), batch_size=8),
    )
    prefixes = {maker._slot(number).turn.prefix for number in range(20)}
    assert prefixes == {
        f"<|im_start|>system\nAsk about {topic}.<|im_end|>\n<|im_start|>user\n" for topic in ("tea", "sea")
    }


def test_no_usable_question_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no usable question in 16 tries"):
        make_questions(tmp_path, num_prompts=4, min_question_tokens=48)


@pytest.mark.parametrize(
    ("second", "expected"),
    [
        ("What is the capital of France?", "duplicate"),
        ("what is  the capital, of france", "duplicate"),
        ("What is the capital of France today?", "near_duplicate"),
        ("What is the capital of Peru?", None),
        ("Write a poem.", None),
    ],
)
def test_duplicates(second: str, expected: str | None) -> None:
    duplicates = DuplicateFilter()
    assert duplicates.reason("What is the capital of France?") is None
    assert duplicates.reason(second) == expected
