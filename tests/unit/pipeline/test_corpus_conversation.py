"""Conversations of several turns: tools, system messages, and one answer or every answer made anew."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers.processors import TemplateProcessing

from pipeline.corpus.chat import takes_tools
from pipeline.corpus.conversation import SkippedRow, every_turn, messages_of, tools_of
from pipeline.corpus.prompts import row_ids
from tests.unit.pipeline.corpus_samples import tiny_tokenizer
from tests.unit.pipeline.corpus_sources import TOOL_TEMPLATE, chat, load, texts, with_template, write_jsonl

TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "x", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
TALK = [
    {"role": "system", "content": "Be brief"},
    {"role": "user", "content": "Is it raining?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "no"},
    {"role": "assistant", "content": "No."},
]


def test_tools_calls_and_results_are_in_the_prompt_and_the_last_answer_is_not(tmp_path: Path) -> None:
    as_text = [*TALK[:2], {**TALK[2], "tool_calls": [{"function": {"name": "weather", "arguments": '{"city": "Rome"}'}}]}, *TALK[3:]]
    rows = [{"messages": TALK, "tools": [TOOL]}, {"messages": as_text, "tools": json.dumps([TOOL])}]
    for number, row in enumerate(rows):
        (prompt,), accounting = load(
            write_jsonl(tmp_path / f"{number}.jsonl", [row]), tmp_path, template=TOOL_TEMPLATE, max_prompt_tokens=500
        )
        (text,) = texts([prompt])
        assert text == (
            f"<|im_start|>tools\nweather: {json.dumps(TOOL)}\n<|im_end|>\n<|im_start|>system\nBe brief<|im_end|>\n"
            "<|im_start|>user\nIs it raining?<|im_end|>\n"
            '<|im_start|>assistant\nCALL weather {"city": "Rome"}<|im_end|>\n<|im_start|>tool\nno<|im_end|>\n<|im_start|>assistant\n'
        )
        assert accounting.num_requested == 1


def test_parquet_nulls_are_not_taken_for_values(tmp_path: Path) -> None:
    """A column of structs fills in the keys of other rows."""
    rows = [
        {"messages": TALK, "tools": [TOOL]},
        {"messages": [{"role": "user", "content": "Hi", "name": "Bo"}], "tools": None},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "p.parquet")
    write_jsonl(tmp_path / "p.jsonl", rows)
    settings = {"template": TOOL_TEMPLATE, "max_prompt_tokens": 500}
    of_parquet = load(tmp_path / "p.parquet", tmp_path, **settings)[0]  # type: ignore[arg-type]
    of_jsonl = load(tmp_path / "p.jsonl", tmp_path, **settings)[0]  # type: ignore[arg-type]
    assert texts(of_parquet)[1] == texts(of_jsonl)[1] == chat("Hi")
    assert "null" not in texts(of_parquet)[0] and "None" not in texts(of_parquet)[0]


def test_tools_that_the_template_leaves_out_are_not_left_out_silently(tmp_path: Path) -> None:
    rows = [
        {"messages": TALK[:2], "tools": [TOOL]},
        {"messages": TALK[:2], "tools": []},
        {"messages": TALK[:2], "tools": "no json"},
        {"messages": TALK[:2], "tools": [7]},
        {"messages": TALK},
    ]
    prompts, accounting = load(write_jsonl(tmp_path / "p.jsonl", rows), tmp_path)
    assert len(prompts) == 1 and dict(accounting.skipped) == {"template_takes_no_tools": 2, "bad_tools": 2}
    assert takes_tools(with_template(TOOL_TEMPLATE)) and not takes_tools(tiny_tokenizer())


def test_one_bos_whoever_writes_it() -> None:
    """Soup 781, mlx-examples 1095: a template that writes BOS, cut by a tokenizer that puts one in front."""
    tokenizer = with_template("{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}")
    bos = tokenizer.bos_token_id
    post = TemplateProcessing(single=f"{tokenizer.bos_token} $A", special_tokens=[(tokenizer.bos_token, bos)])
    tokenizer.backend_tokenizer.post_processor = post
    chat_ids, plain_ids = (row_ids("Hi", tokenizer, chat=is_chat) for is_chat in (True, False))
    assert chat_ids == plain_ids and chat_ids.count(bos) == 1 and chat_ids[0] == bos


def test_turn_by_turn_asks_for_every_answer_and_counts_each(tmp_path: Path) -> None:
    talk = [
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "1"},
        {"role": "user", "content": "word " * 400},
        {"role": "assistant", "content": "2"},
    ]
    path = write_jsonl(tmp_path / "p.jsonl", [{"messages": talk}, {"messages": talk[:1]}, {"messages": talk[1:2]}])
    prompts, accounting = load(path, tmp_path, turn_by_turn=True)
    assert texts(prompts) == [chat("One?")] and [prompt.row for prompt in prompts] == ["p.jsonl:0#0"]
    assert accounting.examples == {
        "prompt_too_long": ["p.jsonl:0#1"], "duplicate": ["p.jsonl:1"], "no_user_turn": ["p.jsonl:2"],
    }  # fmt: skip
    assert accounting.num_requested == 4 == len(prompts) + accounting.skipped.total()


def test_every_turn_ends_where_the_source_answered_or_did_not_yet() -> None:
    ends = [turn[-1]["content"] for turn in every_turn(messages_of([*TALK, {"role": "user", "content": "Sure?"}]))]
    assert ends == ["Is it raining?", "no", "Sure?"]
    with pytest.raises(SkippedRow, match="no_user_turn"):
        every_turn(messages_of([TALK[0], TALK[4]]))


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (None, "empty"), (7, "not_text_or_messages"), ([7], "not_text_or_messages"), ([{"role": "wizard"}], "unknown_role"),
        ([{"from": "function_call", "value": "x"}], "unknown_role"), ([{"content": "x"}], "unknown_role"),
        ([{"role": "user", "content": [{"type": "image"}]}], "content_not_text"),
        ([{"role": "assistant", "content": "", "tool_calls": 5}], "bad_tool_calls"),
    ],
)  # fmt: skip
def test_what_is_no_conversation_is_named(value: object, reason: str) -> None:
    with pytest.raises(SkippedRow, match=f"^{reason}$"):
        messages_of(value)


def test_other_shapes_of_messages_are_read() -> None:
    sharegpt = [{"from": "human", "value": "Hi", "weight": None}, {"from": "gpt", "value": "Yo"}]
    assert messages_of(sharegpt) == [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]
    assert messages_of(json.dumps(sharegpt)) == messages_of(sharegpt), "as CSV holds it"
    assert messages_of([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]) == [
        {"role": "user", "content": "ab"}
    ]
    for role, known in (("User", "user"), ("chatgpt", "assistant"), ("model", "assistant"), ("function", "tool")):
        assert messages_of([{"from": role, "value": "a"}]) == messages_of([{"role": known, "content": "a"}])
    assert tools_of("") is None and tools_of(None) is None
