"""What the benchmark asks: held-out prompts of the corpus, or a file of the user's, as token ids.

A file has one row per prompt: `turns` as in MT-bench (arXiv 2306.05685) and Spec-Bench (arXiv 2401.07851), of
which the first is asked, or one of the columns that `corpus.prompts` reads. `category` and `question_id` are
used where they are.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from eval.teacher_forcing import context_length
from pipeline.corpus.prompts import SkippedRow, row_ids
from pipeline.corpus.sources import COLUMNS, BadRow, printable, question_of, read_rows

FIELD = "bench.prompts"
PROMPT_COLUMNS = ("turns", *COLUMNS)
MAX_LOOKED_AT = 64
MAX_NAMED = 20
#: For models whose config sets no limit.
UNLIMITED_TOKENS = 2**31


@dataclass
class PromptSet:
    """Prompts as token ids, in the order in which they are asked.

    `names` and `category_of`: of each prompt ("" where the file has no category). `skipped`: names of the rows that
    cannot be used, by reason. `categories`: how many prompts of each.
    """

    name: str
    prompts: list[list[int]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    category_of: list[str] = field(default_factory=list)
    skipped: dict[str, list[str]] = field(default_factory=dict)
    categories: dict[str, int] = field(default_factory=dict)

    def skip(self, reason: str, name: str) -> None:
        """Count a row that is left out."""
        self.skipped.setdefault(reason, []).append(name)

    def describe(self) -> dict[str, Any]:
        """For `settings` in bench.json: which prompts, how many, and which rows were left out and why."""
        return {
            "prompt_set": self.name,
            "num_prompts": len(self.prompts),
            "prompt_categories": self.categories,
            "num_skipped_prompts": {reason: len(names) for reason, names in self.skipped.items()},
            "skipped_prompts": {reason: names[:MAX_NAMED] for reason, names in self.skipped.items()},
        }


def prompt_room(models: Iterable[PreTrainedModel], *, num_new_tokens: int) -> int:
    """Tokens that a prompt may have, so that every model's context holds it with an answer of `num_new_tokens`."""
    return min(context_length(model) or UNLIMITED_TOKENS for model in models) - num_new_tokens


def held_out_prompts(rows: Iterable[dict[str, Any]], *, num_prompts: int, max_tokens: int) -> PromptSet:
    """The first distinct prompts of corpus rows that have at most `max_tokens`.

    Raises:
        ValueError: none is short enough.
    """
    chosen = PromptSet("held-out prompts of the corpus")
    seen: set[str] = set()
    for row in rows:
        if row["prompt_id"] in seen or len(chosen.prompts) == num_prompts:
            continue
        seen.add(row["prompt_id"])
        if len(row["prompt_token_ids"]) > max_tokens:
            chosen.skip("prompt_too_long", row["prompt_id"])
        else:
            chosen.prompts.append(list(row["prompt_token_ids"]))
            chosen.names.append(row["prompt_id"])
            chosen.category_of.append("")
    return _require_some(chosen, max_tokens)


def check_prompt_file(path: str, *, field: str = FIELD) -> None:
    """Find what is wrong with a prompts file without reading more than its first good row: one odd row must not hide the others.

    Raises:
        ValueError: no such file, an unknown kind of file, no row that can be read, or no column with prompts.
    """
    names: dict[str, None] = {}
    num_looked_at = 0
    for row in _read(path, field):
        if isinstance(row, BadRow):
            continue
        if any(name in row for name in PROMPT_COLUMNS):
            return
        names |= dict.fromkeys(map(str, row))
        num_looked_at += 1
        if num_looked_at == MAX_LOOKED_AT:
            break
    if not num_looked_at:
        raise ValueError(f"{field}={path!r} has no rows that can be read: give a file with at least one")
    raise ValueError(f"{field}={path!r} has none of the columns {list(PROMPT_COLUMNS)}; it has {list(names)}")


def file_prompts(
    path: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    chat: bool,
    num_prompts: int,
    max_tokens: int,
    field: str = FIELD,
) -> PromptSet:
    """`num_prompts` prompts of a file, of at most `max_tokens` each; categories take turns.

    Args:
        chat: put each prompt into the target's chat template, as the user's turn.
        field: the setting that the path came from, for messages.

    Raises:
        ValueError: the file cannot be read, or no row can be used.
    """
    check_prompt_file(path, field=field)
    chosen = PromptSet(Path(path).name)
    by_category: dict[str, list[tuple[str, list[int]]]] = {}
    for number, row in enumerate(_read(path, field)):
        name = printable(row.get("question_id", f"row {number}"))
        try:
            ids = row_ids(row if isinstance(row, BadRow) else _asked(row), tokenizer, chat=chat)
        except SkippedRow as skipped:
            chosen.skip(str(skipped), name)
            continue
        if len(ids) > max_tokens:
            chosen.skip("prompt_too_long", name)
        else:
            category = printable(row.get("category") or row.get("domain") or "")
            by_category.setdefault(category, []).append((name, ids))
    in_turn = chain.from_iterable(
        zip_longest(*([(c, *row) for row in rows] for c, rows in by_category.items()))
    )
    taken = [entry for entry in in_turn if entry is not None][:num_prompts]
    chosen.prompts = [ids for _, _, ids in taken]
    chosen.names = [name for _, name, _ in taken]
    chosen.category_of = [category for category, _, _ in taken]
    chosen.categories = dict(Counter(category for category in chosen.category_of if category))
    return _require_some(chosen, max_tokens, group=field.partition(".")[0])


def _read(path: str, field: str) -> Iterator[dict[str, Any]]:
    if not Path(path).is_file():
        raise ValueError(f"{field}={path!r}: no such file")
    return read_rows(path, "train", field=field)


def _asked(row: dict[str, Any]) -> Any:
    """The row's prompt, a text or a list of messages: of several turns the first, and None where there is none.

    Turns also stand in `prompt` (MT-bench on the Hugging Face hub), as JSON text (CSV), and as `{"content": ...}` (Arena-Hard).
    """
    column = next((name for name in PROMPT_COLUMNS if row.get(name) is not None), None)
    if column is None:
        return None
    value = question_of(row, column)
    if column == "turns" and isinstance(value, str) and value.lstrip().startswith("["):
        with suppress(ValueError, RecursionError):
            value = json.loads(value)
    has_turns = column == "turns" or (bool(value) and isinstance(value, list) and all(isinstance(turn, str) for turn in value))
    if not has_turns or not isinstance(value, list):
        return value
    first = value[0] if value else None
    return first.get("content") if isinstance(first, dict) else first


def _require_some(chosen: PromptSet, max_tokens: int, *, group: str = "bench") -> PromptSet:
    if not chosen.prompts:
        reasons = {reason: len(names) for reason, names in chosen.skipped.items()}
        raise ValueError(
            f"{group}: none of the {chosen.name} can be used ({reasons}); a prompt may have {max_tokens} tokens beside "
            f"the answer: lower {group}.max_new_tokens or choose other prompts"
        )
    return chosen
