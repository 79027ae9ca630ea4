"""Prompts as token ids, out of the rows of the user's sources; rows that cannot be used are counted by reason."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Optional

from transformers import PreTrainedTokenizerBase

from pipeline.corpus.accounting import Accounting
from pipeline.corpus.chat import Message, prompt_ids, takes_tools
from pipeline.corpus.conversation import (
    SkippedRow,
    every_turn,
    last_turn,
    messages_of,
    require_unicode,
    tools_of,
    unpacked,
)
from pipeline.corpus.hash_table import HashSet
from pipeline.corpus.rows import Prompt, make_prompt
from pipeline.corpus.sources import BAD_ROW, BadRow, Record, read_records
from pipeline.corpus_schema import SourceConfig
from pipeline.schema import Config

__all__ = ["Admission", "Prompt", "PromptReader", "SkippedRow", "make_prompt", "row_ids"]


class Admission:
    """Passes each prompt once, if it is short enough: the same text from two sources is one prompt."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self._seen = HashSet()

    def admit(self, prompt: Prompt) -> Prompt:
        """The prompt itself; raises SkippedRow."""
        if not prompt.token_ids:
            raise SkippedRow("empty")
        if len(prompt.token_ids) > self.max_tokens:
            raise SkippedRow("prompt_too_long")
        if not self._seen.add(int(prompt.prompt_id[:16], 16)):
            raise SkippedRow("duplicate")
        return prompt


class PromptReader:
    """Turns a source into prompts, one row at a time, and counts each row that it reads."""

    def __init__(
        self,
        config: Config,
        tokenizer: PreTrainedTokenizerBase,
        accounting: Accounting,
        admission: Optional[Admission] = None,
    ) -> None:
        self.corpus, self.chat, self.tokenizer = config.corpus, config.target.chat, tokenizer
        self.accounting = accounting
        self.admission = admission or Admission(config.corpus.max_prompt_tokens)
        self.takes_tools = self.chat and takes_tools(tokenizer)

    def prompts(self, source: SourceConfig) -> Iterator[Prompt]:
        """The prompts of a source, lazily.

        Raises:
            ValueError: as `read_records`, in the call itself.
        """
        assert source.prompts is not None
        return self._prompts(Path(source.prompts).name, read_records(source))

    def _prompts(self, name: str, records: Iterator[Record]) -> Iterator[Prompt]:
        for number, record in enumerate(records):
            row = f"{name}:{number}"
            try:
                turns = self._turns(record)
            except SkippedRow as skipped:
                self.accounting.num_requested += 1
                self.accounting.skip(str(skipped), row)
                continue
            for turn, encode in enumerate(turns):
                turn_row = row if len(turns) == 1 else f"{row}#{turn}"
                self.accounting.num_requested += 1
                try:
                    ids = encode()
                    prompt = make_prompt(ids, source=name, row=turn_row, domain=record.domain)
                    prompt = self.admission.admit(prompt)
                except SkippedRow as skipped:
                    self.accounting.skip(str(skipped), turn_row)
                    continue
                yield prompt

    def _turns(self, record: Record) -> list[Callable[[], list[int]]]:
        """For each answer that the row asks for, what makes its prompt's ids."""
        if not self.chat:
            return [lambda: text_ids(record.value, self.tokenizer, prefix_tokens=self.corpus.prefix_tokens)]
        tools = tools_of(record.tools)
        messages = _chat_messages(record.value)
        uses_tools = tools is not None or any(message.get("tool_calls") for message in messages[:-1])
        if uses_tools and not self.takes_tools:
            raise SkippedRow("template_takes_no_tools")
        if record.system and messages[:1] and messages[0]["role"] not in ("system", "developer"):
            messages = [{"role": "system", "content": record.system}, *messages]
        if not self.corpus.turn_by_turn:
            return [lambda: chat_ids(last_turn(messages), self.tokenizer, tools)]
        return [
            lambda turn=turn: chat_ids(last_turn(turn), self.tokenizer, tools)  # type: ignore[misc]
            for turn in every_turn(messages)
        ]


def row_ids(value: Any, tokenizer: PreTrainedTokenizerBase, *, chat: bool) -> list[int]:
    """Token ids of a text or of a list of messages up to its last question; raises SkippedRow with the reason."""
    if not chat:
        return text_ids(value, tokenizer)
    return chat_ids(last_turn(_chat_messages(value)), tokenizer, None)


def _chat_messages(value: Any) -> list[Message]:
    if isinstance(value, BadRow):
        raise SkippedRow(BAD_ROW)
    return messages_of(value)


def chat_ids(
    messages: list[Message], tokenizer: PreTrainedTokenizerBase, tools: Optional[list[Any]]
) -> list[int]:
    """Token ids of a conversation with the assistant's header opened; raises SkippedRow."""
    try:
        return prompt_ids(tokenizer, messages, tools)
    except Exception as error:  # a template is a program of its own, and may raise anything
        raise SkippedRow("template_error") from error


def text_ids(
    value: Any, tokenizer: PreTrainedTokenizerBase, *, prefix_tokens: Optional[int] = None
) -> list[int]:
    """Token ids of a text for a base model, or its first `prefix_tokens`; raises SkippedRow."""
    if isinstance(value, BadRow):
        raise SkippedRow(BAD_ROW)
    value = unpacked(value)
    if isinstance(value, list):
        raise SkippedRow("messages_for_a_base_model")
    if not isinstance(value, str):
        raise SkippedRow("empty" if value is None else "not_text_or_messages")
    if not value.strip():
        raise SkippedRow("empty")
    require_unicode(value)
    ids = list(tokenizer.encode(value))
    if ids[-1:] == [tokenizer.eos_token_id] and not value.endswith(str(tokenizer.eos_token)):
        ids.pop()  # some tokenizers append one, and nothing follows that
    return ids[:prefix_tokens]
