"""Prompts: sources, columns, roles, templates, domains, and what is skipped."""

import csv
import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict
from tokenizers.processors import TemplateProcessing

from pipeline.corpus import check_prompts
from pipeline.corpus.prompts import text_ids
from pipeline.corpus_schema import ShareConfig
from tests.unit.pipeline.corpus_samples import tiny_config, tiny_tokenizer
from tests.unit.pipeline.corpus_sources import chat, load, texts, with_template, write_jsonl


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
        "bad_row": 1,
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


@pytest.mark.parametrize(
    "row",
    ["[" * 100_000, '{"prompt": ' + "9" * 5000 + "}", '{"prompt": "x"', "null", "\x00", '{"prompt": {"a": 1}}', '{"id": 7}'],
    ids=["deep", "long number", "cut", "null", "NUL", "object", "no prompt"],
)
@pytest.mark.parametrize("place", [0, 1])
def test_no_row_ends_the_run_wherever_it_stands(tmp_path: Path, row: str, place: int) -> None:
    """speculators 801: also as the first row, from which the columns are taken."""
    rows: list[object] = [{"prompt": "one"}, {"prompt": "two"}]
    rows.insert(place, row)
    prompts, accounting = load(write_jsonl(tmp_path / "p.jsonl", rows), tmp_path)
    assert texts(prompts) == [chat("one"), chat("two")]
    assert accounting.skipped.total() == 1 and list(accounting.examples.values()) == [[f"p.jsonl:{place}"]]


@pytest.mark.parametrize("suffix", [".jsonl", ".JSONL", ".jsonl.gz", ".csv", ".csv.gz"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_files_come_packed_and_in_other_encodings(tmp_path: Path, suffix: str, encoding: str) -> None:
    """A row lost here would be one of speculators 801; PowerShell writes UTF-16."""
    content = "prompt\r\nWas für ein Tag?\r\n" if "csv" in suffix else '{"prompt": "Was für ein Tag?"}\r\n'
    path = tmp_path / f"p{suffix}"
    path.write_bytes(gzip.compress(content.encode(encoding)) if suffix.endswith("gz") else content.encode(encoding))
    prompts, accounting = load(path, tmp_path)
    assert texts(prompts) == [chat("Was für ein Tag?")] and accounting.num_requested == 1


@pytest.mark.parametrize(("name", "start"), [("p.jsonl", b""), ("p.csv", b"prompt\n"), ("p.json", b"[")])
@pytest.mark.parametrize("is_chat", [True, False])
def test_bytes_of_another_encoding_are_no_prompt(tmp_path: Path, name: str, start: bytes, is_chat: bool) -> None:
    """Replaced by question marks they would be trained on; the row is skipped and named (speculators 801)."""
    rows = [b"Caf\xe9?", b"Tea?"] if name == "p.csv" else [b'{"prompt": "Caf\xe9?"}', b'{"prompt": "Tea?"}']
    content = b",\n".join(rows) + b"]" if name == "p.json" else b"\n".join(rows)
    (tmp_path / name).write_bytes(start + content)
    prompts, accounting = load(tmp_path / name, tmp_path, chat=is_chat)
    assert texts(prompts) == [chat("Tea?") if is_chat else "Tea?"]
    assert accounting.examples == {"not_unicode": [f"{name}:0"]}


def test_a_source_that_breaks_off_is_named(tmp_path: Path) -> None:
    """What `datasets` or gzip raise in the middle of a source is no traceback (speculators 801)."""
    folder = tmp_path / "files"
    folder.mkdir()
    write_jsonl(folder / "a.jsonl", [{"prompt": "a", "x": 1}])
    write_jsonl(folder / "b.jsonl", [{"prompt": "b", "y": "z"}])
    packed = gzip.compress("".join(f'{{"prompt": "{i} {hash(i)}"}}\n' for i in range(9999)).encode())
    (tmp_path / "cut.jsonl.gz").write_bytes(packed[: len(packed) // 2])
    for place in (folder, tmp_path / "cut.jsonl.gz"):
        with pytest.raises(ValueError, match=f"corpus.prompts='{place}': cannot be read to its end"):
            load(place, tmp_path, num_prompts=None)


def test_a_file_has_no_splits(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "p.jsonl", [{"prompt": "one"}])
    with pytest.raises(ValueError, match="is one file: it has no split='test'"):
        load(path, tmp_path, prompts_split="test")


def test_a_template_may_raise_anything(tmp_path: Path) -> None:
    """speculators 801: here a division by zero, in one row of two."""
    template = "{{ 1 // (messages[0].content | length - 3) }}{% for m in messages %}{{ m.content }}{% endfor %}"
    path = write_jsonl(tmp_path / "p.jsonl", [{"prompt": "abc"}, {"prompt": "fine"}])
    prompts, accounting = load(path, tmp_path, template=template)
    assert len(prompts) == 1 and accounting.examples == {"template_error": ["p.jsonl:0"]}


def test_a_byte_order_mark_costs_no_row(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "one"}\r\n{"prompt": "two"}\r\n', encoding="utf-8-sig")
    prompts, accounting = load(path, tmp_path)
    assert texts(prompts) == [chat("one"), chat("two")] and not accounting.skipped


def test_num_prompts_stops_reading_and_null_takes_all(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "p.jsonl", [{"text": f"question {i}"} for i in range(30)])
    assert len(load(path, tmp_path, num_prompts=5)[0]) == 5
    assert len(load(path, tmp_path, num_prompts=None)[0]) == 30


def test_prompt_ids_are_hashes_of_the_ids(tmp_path: Path) -> None:
    """speculators 716: stable content ids, whatever the file, the order and the temperature."""
    forth = load(write_jsonl(tmp_path / "a.jsonl", [{"text": "one"}, {"text": "two"}]), tmp_path)[0]
    back = load(
        write_jsonl(tmp_path / "b.jsonl", [{"text": "two"}, {"text": "one"}]), tmp_path, shares=[ShareConfig(1.0, 0.7)]
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
    with pytest.raises(ValueError, match=r"none of the 2 rows.*'empty': 2"):
        load(write_jsonl(tmp_path / "p.jsonl", [{"text": ""}, {"text": " "}]), tmp_path)


def test_chat_needs_a_template_and_a_base_model_needs_prompts(tmp_path: Path) -> None:
    config = tiny_config(tmp_path)
    with pytest.raises(ValueError, match=r"target\.chat=true.*chat template"):
        check_prompts(config, with_template(None))
    config.corpus.prefix_tokens = 3
    with pytest.raises(ValueError, match=r"corpus\.prefix_tokens=3: only the texts of a base model"):
        check_prompts(config, tiny_tokenizer())
    config.corpus.prefix_tokens, config.corpus.turn_by_turn, config.target.chat = None, True, False
    with pytest.raises(ValueError, match=r"corpus\.turn_by_turn=true: the texts of a base model"):
        check_prompts(config, tiny_tokenizer())
    config.corpus.turn_by_turn = False
    with pytest.raises(ValueError, match=r"target\.chat=false.*corpus\.prompts"):
        check_prompts(config, tiny_tokenizer())


def test_base_model_gets_the_bare_text_or_its_first_tokens(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "p.jsonl", [{"text": "Once upon a time"}, {"text": [{"role": "user", "content": "x"}]}, {"text": ""}])
    prompts, accounting = load(path, tmp_path, chat=False)
    assert texts(prompts) == ["Once upon a time"]
    assert dict(accounting.skipped) == {"messages_for_a_base_model": 1, "empty": 1}
    cut = load(path, tmp_path, chat=False, prefix_tokens=3)[0]
    assert [prompt.token_ids for prompt in cut] == [prompts[0].token_ids[:3]]


def test_a_base_models_prompt_does_not_end_with_the_end_that_its_tokenizer_appends() -> None:
    plain, appending = tiny_tokenizer(), tiny_tokenizer()
    end = str(appending.eos_token)
    appending.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"$A {end}", special_tokens=[(end, appending.eos_token_id)]
    )
    assert appending.encode("Once upon")[-1] == appending.eos_token_id
    assert text_ids("Once upon", appending) == text_ids("Once upon", plain)
    assert text_ids("Once upon", appending, prefix_tokens=2) == text_ids("Once upon", plain)[:2]
    assert text_ids("Once" + end, plain)[-1] == plain.eos_token_id, "the user's own stays"


def test_domains_come_from_a_column_and_tell_sources_apart(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "p.jsonl", [{"text": "a", "topic": "maths"}, {"text": "b"}, {"text": "c", "topic": 7}])
    assert [prompt.domain for prompt in load(path, tmp_path, domain_column="topic")[0]] == ["maths", "", "7"]
    assert [prompt.domain for prompt in load(path, tmp_path)[0]] == [""] * 3
    with pytest.raises(ValueError, match=r"domain_column='subject'.*\['text', 'topic'\]"):
        load(path, tmp_path, domain_column="subject")


def test_alpaca_fields_and_system_columns_are_not_lost(tmp_path: Path) -> None:
    rows = [{"instruction": "Translate:", "input": "Hallo", "output": "x"}, {"instruction": "Sing", "input": ""}]
    assert texts(load(write_jsonl(tmp_path / "a.jsonl", rows), tmp_path)[0]) == [chat("Translate:\n\nHallo"), chat("Sing")]
    rows = [{"question": "Why?", "system_prompt": "Be brief"}]
    assert texts(load(write_jsonl(tmp_path / "b.jsonl", rows), tmp_path)[0]) == [
        "<|im_start|>system\nBe brief<|im_end|>\n" + chat("Why?")
    ]


def test_one_prompt_of_two_sources_is_taken_once(tmp_path: Path) -> None:
    rows = [{"text": "same"}, {"text": [{"role": "user", "content": "same"}]}, {"text": "other"}]
    prompts, accounting = load(write_jsonl(tmp_path / "p.jsonl", rows), tmp_path)
    assert texts(prompts) == [chat("same"), chat("other")] and accounting.examples["duplicate"] == ["p.jsonl:1"]
