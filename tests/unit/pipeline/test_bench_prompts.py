"""The benchmark's prompts: Spec-Bench files, columns, chat templates, room for the answer."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pipeline.bench_prompts import PromptSet, check_prompt_file, file_prompts, held_out_prompts
from tests.conftest import Composer
from tests.unit.pipeline.corpus_samples import tiny_tokenizer

QUESTIONS = [
    {"question_id": 81, "category": "writing", "turns": ["Write.", "Again."]},
    {"question_id": 82, "category": "writing", "turns": ["Draw."]},
    {"question_id": 83, "category": "math", "turns": ["Add."]},
    {"question_id": 84, "category": "rag", "turns": ["x" * 200]},
    {"question_id": 85, "category": "math", "turns": []},
]


def write(folder: Path, rows: Sequence[dict[str, Any]], name: str = "questions.jsonl") -> str:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def read(path: str, *, chat: bool = True, num_prompts: int = 10, max_tokens: int = 60) -> PromptSet:
    return file_prompts(path, tiny_tokenizer(), chat=chat, num_prompts=num_prompts, max_tokens=max_tokens)


def test_first_turns_are_asked_in_the_chat_template_and_categories_take_turns(tmp_path: Path) -> None:
    chosen = read(write(tmp_path, QUESTIONS))
    texts = [tiny_tokenizer().decode(ids) for ids in chosen.prompts]
    expected = [
        f"<|im_start|>user\n{word}<|im_end|>\n<|im_start|>assistant\n" for word in ("Write.", "Add.", "Draw.")
    ]
    assert texts == expected
    assert chosen.categories == {"writing": 2, "math": 1}
    assert chosen.describe() == {
        "prompt_set": "questions.jsonl",
        "num_prompts": 3,
        "prompt_categories": {"writing": 2, "math": 1},
        "num_skipped_prompts": {"prompt_too_long": 1, "empty": 1},
        "skipped_prompts": {"prompt_too_long": ["84"], "empty": ["85"]},
    }
    assert read(write(tmp_path, QUESTIONS), num_prompts=2).categories == {"writing": 1, "math": 1}


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"prompt": "Hello"}, "Hello"),
        ({"text": "Hello", "category": "qa"}, "Hello"),
        (
            {"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "no"}]},
            "Hello",
        ),
        ({"prompt": ["Hello", "And then?"], "category": "writing"}, "Hello"),  # MT-bench on the Hugging Face hub
        ({"turns": [{"content": "Hello"}]}, "Hello"),  # Arena-Hard
        ({"turns": "[\"Hello\", \"And then?\"]"}, "Hello"),  # as a CSV file holds them
        ({"turns": "Hello"}, "Hello"),
        ({"turns": None, "prompt": "Hello"}, "Hello"),  # as Parquet fills what one of two files lacks
        ({"instruction": "Repeat.", "input": "Hello", "output": "no"}, "Repeat.\n\nHello"),  # Alpaca
    ],
)
def test_the_columns_of_a_corpus_are_read_too(tmp_path: Path, row: dict[str, Any], text: str) -> None:
    (ids,) = read(write(tmp_path, [row])).prompts
    assert tiny_tokenizer().decode(ids) == f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


def test_a_base_model_gets_the_text_itself(tmp_path: Path) -> None:
    (ids,) = read(write(tmp_path, [{"turns": ["Hello"]}]), chat=False).prompts
    assert tiny_tokenizer().decode(ids) == "Hello"


def test_one_odd_row_does_not_end_the_run(tmp_path: Path) -> None:
    """speculators 801: wherever it stands, it is counted and named."""
    chosen = read(write(tmp_path, [{"note": "x"}, {"turns": ["Add."]}, {"note": "y"}, {"turns": []}]))
    assert len(chosen.prompts) == 1
    assert chosen.skipped == {"empty": ["row 0", "row 2", "row 3"]}


def test_a_category_in_another_encoding_can_be_written(tmp_path: Path) -> None:
    path = tmp_path / "excel.csv"
    path.write_bytes("question_id,category,prompt\nä1,Übung,Add.\n".encode("latin-1"))
    text = json.dumps(read(str(path)).describe(), ensure_ascii=False)
    assert text.encode() and "bung" in text


def test_mistakes_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"bench\.prompts='nowhere\.jsonl': no such file"):
        check_prompt_file("nowhere.jsonl")
    with pytest.raises(ValueError, match=r"bench\.prompts=.*unknown kind of file"):
        check_prompt_file(write(tmp_path, QUESTIONS, "questions.txt"))
    with pytest.raises(ValueError, match=r"none of the columns.*'turns'.*it has \['answer'\]"):
        check_prompt_file(write(tmp_path, [{"answer": "x"}]))
    with pytest.raises(ValueError, match="no rows that can be read"):
        check_prompt_file(write(tmp_path, []))
    with pytest.raises(ValueError, match=r"prompt_too_long.*bench\.max_new_tokens"):
        read(write(tmp_path, QUESTIONS), max_tokens=2)
    with pytest.raises(ValueError, match=r"^eval: none.*lower eval\.max_new_tokens"):
        file_prompts(write(tmp_path, QUESTIONS), tiny_tokenizer(), chat=True, num_prompts=1, max_tokens=2, field="eval.prompts")


def test_held_out_prompts_leave_room_for_the_answer_and_come_once() -> None:
    lengths = {"a": 3, "b": 9, "c": 4, "d": 2}
    rows = [{"prompt_id": i, "prompt_token_ids": [7] * lengths[i]} for i in ("a", "b", "a", "c", "d", "b")]
    chosen = held_out_prompts(rows, num_prompts=2, max_tokens=4)
    assert [len(ids) for ids in chosen.prompts] == [3, 4]
    assert chosen.skipped == {"prompt_too_long": ["b"]}
    with pytest.raises(ValueError, match="held-out prompts"):
        held_out_prompts(rows, num_prompts=2, max_tokens=1)


def test_an_empty_setting_is_refused(make_config: Composer) -> None:
    with pytest.raises(ValueError, match=r"bench\.prompts has no value"):
        make_config("bench.prompts=''")
