"""Messages of all the shapes that datasets have, cleaned, and cut where an answer of the target's is wanted."""

import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Optional

from pipeline.corpus.chat import ROLES, Message

#: What ShareGPT, Gemma and older datasets call the roles.
_ROLE_NAMES = {
    "human": "user",
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "bot", "ai", "model"), "assistant"),
    **dict.fromkeys(("observation", "function"), "tool"),
}


class SkippedRow(Exception):
    """A row that cannot become a prompt; the message is the reason it is counted under."""


def messages_of(value: Any) -> list[Message]:
    """A text as the user's message, or a list of messages (JSON text of one, too); raises SkippedRow.

    Also reads the `from`/`value` form, contents in parts, and tool calls whose arguments are JSON text.
    """
    value = unpacked(value)
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise SkippedRow("empty" if value is None else "not_text_or_messages")
    return [_message(item) for item in value]


def unpacked(value: Any) -> Any:
    """CSV holds messages as JSON text."""
    if isinstance(value, str) and value.lstrip().startswith("[{"):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def last_turn(messages: Sequence[Message]) -> list[Message]:
    """Messages up to the last one that asks for an answer; the source's own last answer is dropped.

    Raises SkippedRow where there is none.
    """
    asked = list(messages)
    while asked and asked[-1]["role"] not in ("user", "tool"):
        asked.pop()
    if not asked:
        raise SkippedRow("no_user_turn")
    if asked[-1]["role"] == "user" and not asked[-1]["content"].strip():
        raise SkippedRow("empty")
    return asked


def every_turn(messages: Sequence[Message]) -> list[list[Message]]:
    """One conversation for each answer that was given or is due, with the source's history before it.

    Several assistant messages in a row are one answer. Raises SkippedRow where there is none.
    """
    ends = [
        index
        for index in range(1, len(messages) + 1)
        if messages[index - 1]["role"] in ("user", "tool")
        and (index == len(messages) or messages[index]["role"] == "assistant")
    ]
    if not ends:
        raise SkippedRow("no_user_turn")
    return [list(messages[:end]) for end in ends]


def tools_of(value: Any) -> Optional[list[Any]]:
    """The tools beside a conversation, from a list or JSON text; None for none. Raises SkippedRow."""
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise SkippedRow("bad_tools") from error
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise SkippedRow("bad_tools")
    return [_without_nulls(tool) for tool in value]


def require_unicode(text: str) -> None:
    """Raises SkippedRow for what no tokenizer takes: halves of characters, or bytes of another encoding than the file's."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise SkippedRow("not_unicode") from error


def _message(value: Any) -> Message:
    if not isinstance(value, dict):
        raise SkippedRow("not_text_or_messages")
    message: Message = _without_nulls(value)
    if "from" in message and "role" not in message:
        message = {"role": message.pop("from"), "content": message.pop("value", ""), **message}
    role = str(message.get("role")).lower()
    message["role"] = _ROLE_NAMES.get(role, role)
    if message["role"] not in ROLES:
        raise SkippedRow("unknown_role")
    content = message.get("content", "")
    if isinstance(content, list) and all(
        isinstance(part, dict) and isinstance(part.get("text"), str) for part in content
    ):
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise SkippedRow("content_not_text")
    require_unicode(content)
    message["content"] = content
    if message.get("tool_calls"):
        if not isinstance(message["tool_calls"], list):
            raise SkippedRow("bad_tool_calls")
        message["tool_calls"] = [_tool_call(call) for call in message["tool_calls"]]
    return message


def _tool_call(call: Any) -> Any:
    """Templates print the arguments as JSON themselves: JSON text would be quoted twice."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if isinstance(function, dict) and isinstance(function.get("arguments"), str):
        with suppress(ValueError, RecursionError):
            function["arguments"] = json.loads(function["arguments"])
    return call


def _without_nulls(value: Any) -> Any:
    """Parquet fills the keys that other rows have with nulls."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value
