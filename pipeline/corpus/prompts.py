"""Prompts as token ids, out of a file or dataset of the user's; rows that cannot be used are counted by reason."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

from pipeline.corpus.accounting import Accounting
from pipeline.corpus.chat import ROLES, Message, prompt_ids, require_chat_template
from pipeline.corpus.sources import BAD_JSON, BadRow, read_prompts
from pipeline.schema import Config

_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}


class SkippedRow(Exception):
    """A row that cannot become a prompt; the message is the reason it is counted under."""


@dataclass(frozen=True)
class Prompt:
    """What the target is asked. `prompt_id` is a hash of the ids: the same on every run and machine."""

    prompt_id: str
    source: str
    token_ids: tuple[int, ...]
    row: str


def make_prompt(token_ids: Sequence[int], *, source: str, row: str) -> Prompt:
    """A prompt with its content id."""
    text = ",".join(str(token_id) for token_id in token_ids)
    return Prompt(hashlib.sha256(text.encode()).hexdigest()[:32], source, tuple(token_ids), row)


def check_prompts(config: Config, tokenizer: PreTrainedTokenizerBase) -> None:
    """Find the mistakes in `corpus` and `target.chat` that can be found before any long work.

    Raises:
        ValueError: chat without a chat template, no prompts for a base model, a missing or empty file, no such column.
    """
    if config.target.chat:
        require_chat_template(tokenizer)
    elif config.corpus.prompts is None:
        raise ValueError(
            "target.chat=false: a base model cannot invent questions; set corpus.prompts=<file or dataset>"
        )
    if config.corpus.prompts is not None:
        next(
            iter(
                read_prompts(config.corpus.prompts, config.corpus.prompts_column, config.corpus.prompts_split)
            )
        )


def file_prompts(config: Config, tokenizer: PreTrainedTokenizerBase, accounting: Accounting) -> list[Prompt]:
    """The first `corpus.num_prompts` rows of `corpus.prompts` as prompts, without those that are skipped.

    Raises:
        ValueError: as `check_prompts`, or when no row is left.
    """
    corpus = config.corpus
    assert corpus.prompts is not None
    source = Path(corpus.prompts).name
    seen: set[str] = set()
    prompts: list[Prompt] = []
    for number, value in enumerate(read_prompts(corpus.prompts, corpus.prompts_column, corpus.prompts_split)):
        if number == corpus.num_prompts:
            break
        accounting.num_requested += 1
        row = f"{source}:{number}"
        try:
            ids = row_ids(value, tokenizer, chat=config.target.chat)
            prompts.append(
                admit(make_prompt(ids, source=source, row=row), seen, max_tokens=corpus.max_prompt_tokens)
            )
        except SkippedRow as skipped:
            accounting.skip(str(skipped), row)
    if not prompts:
        raise ValueError(
            f"corpus.prompts={corpus.prompts!r}: none of its {accounting.num_requested} rows can be used: {dict(accounting.skipped)}"
        )
    return prompts


def admit(prompt: Prompt, seen: set[str], *, max_tokens: int) -> Prompt:
    """Pass a prompt through that is new and short enough; raises SkippedRow otherwise."""
    if len(prompt.token_ids) > max_tokens:
        raise SkippedRow("prompt_too_long")
    if prompt.prompt_id in seen:
        raise SkippedRow("duplicate")
    seen.add(prompt.prompt_id)
    return prompt


def row_ids(value: Any, tokenizer: PreTrainedTokenizerBase, *, chat: bool) -> list[int]:
    """Token ids of a text or of a list of messages; raises SkippedRow with the reason."""
    if isinstance(value, BadRow):
        raise SkippedRow(BAD_JSON)
    value = _unpacked(value)
    if isinstance(value, str):
        if not value.strip():
            raise SkippedRow("empty")
        if not chat:
            return list(tokenizer.encode(value))
        value = [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise SkippedRow("empty" if value is None else "not_text_or_messages")
    if not chat:
        raise SkippedRow("messages_for_a_base_model")
    messages = conversation(value)
    try:
        return prompt_ids(tokenizer, messages)
    except (TemplateError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise SkippedRow("template_error") from error


def _unpacked(value: Any) -> Any:
    """CSV holds messages as JSON text."""
    if isinstance(value, str) and value.lstrip().startswith("[{"):
        try:
            return json.loads(value)
        except json.JSONDecodeError:
            return value
    return value


def conversation(values: Sequence[Any]) -> list[Message]:
    """Messages up to the last one that asks for an answer; the source's own last answer is dropped.

    Also reads the `from`/`value` form of messages. Raises SkippedRow.
    """
    messages = [_message(value) for value in values]
    while messages and messages[-1]["role"] not in ("user", "tool"):
        messages.pop()
    if not messages:
        raise SkippedRow("no_user_turn")
    if not messages[-1]["content"].strip():
        raise SkippedRow("empty")
    return messages


def _message(value: Any) -> Message:
    if not isinstance(value, dict):
        raise SkippedRow("not_text_or_messages")
    message = {key: item for key, item in value.items() if item is not None}
    if "from" in message and "role" not in message:
        role = str(message.pop("from"))
        message = {"role": _SHAREGPT_ROLES.get(role, role), "content": message.get("value", "")}
    if message.get("role") not in ROLES:
        raise SkippedRow("unknown_role")
    content = message.get("content", "")
    if isinstance(content, list) and all(
        isinstance(part, dict) and isinstance(part.get("text"), str) for part in content
    ):
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise SkippedRow("content_not_text")
    return {**message, "content": content}
