"""What a chat template says about turns: the text up to the user's words, and what ends them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Optional, Protocol

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

ROLES = ("system", "developer", "user", "assistant", "tool")
_SENTINEL = "draftsmithsentinel"

Message = dict[str, Any]


class Configured(Protocol):
    """A target's configurations: those of its folder, or of the loaded model."""

    @property
    def config(self) -> Any: ...

    @property
    def generation_config(self) -> Any: ...


@dataclass(frozen=True)
class UserTurn:
    """The rendered text before the user's words, the text after them, and the ids that end a question."""

    prefix: str
    suffix: str
    stop_token_ids: frozenset[int]


def require_chat_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a base model where chat is asked for.

    Raises:
        ValueError: the tokenizer has no chat template.
    """
    if not tokenizer.chat_template:
        raise ValueError(
            "target.chat=true, but the target's tokenizer has no chat template. Use an instruction-tuned target, or set "
            "target.chat=false and corpus.prompts=<file or dataset with a text column> for a base model."
        )


def user_turn(
    tokenizer: PreTrainedTokenizerBase, target: Configured, system_prompt: Optional[str]
) -> UserTurn:
    """Render a sentinel as the user's message and cut there, which works for any template (Xu et al. 2024, Magpie).

    Raises:
        ValueError: the template does not put the user's words into the text, or refuses the system prompt or drops it.
    """
    messages: list[Message] = [{"role": "system", "content": system_prompt}] if system_prompt else []
    messages.append({"role": "user", "content": _SENTINEL})
    try:
        text = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=False))
    except (TemplateError, ValueError, TypeError) as error:
        raise ValueError(
            f"corpus.system_prompts: the target's chat template refuses {messages}: {error}"
        ) from error
    if system_prompt and _squeezed(system_prompt) not in _squeezed(text):
        raise ValueError(
            "corpus.system_prompts: the target's chat template leaves system prompts out of the text, so they and corpus.topics would "
            "change nothing; set both to []"
        )
    if text.count(_SENTINEL) != 1:
        raise ValueError(
            "The target's chat template does not show where the user's words go, so it cannot be used to invent "
            "questions. Set corpus.prompts=<file or dataset>."
        )
    prefix, suffix = text.split(_SENTINEL)
    return UserTurn(prefix, suffix, stop_ids(target, tokenizer) | _end_of_turn(tokenizer, suffix))


def _squeezed(text: str) -> str:
    """Without white space, which templates trim."""
    return "".join(text.split())


def _end_of_turn(tokenizer: PreTrainedTokenizerBase, suffix: str) -> frozenset[int]:
    """The special token with which the template ends the user's turn, if it uses one."""
    ids = tokenizer.encode(suffix.strip(), add_special_tokens=False)
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    return frozenset(ids[:1]) if ids and ids[0] in special else frozenset()


def stop_ids(target: Configured, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The ids that end the target's text: its generation config's, else its config's, else its tokenizer's EOS.

    Ids that the target cannot put out are left out: some configs name those of a larger tokenizer, or -1 for none.
    """
    vocab_size = int(target.config.get_text_config().vocab_size)
    for source in (target.generation_config, target.config.get_text_config(), tokenizer):
        ids = getattr(source, "eos_token_id", None)
        if ids is not None:
            named = ids if isinstance(ids, list) else [int(ids)]
            return frozenset(token_id for token_id in named if 0 <= token_id < vocab_size)
    return frozenset()


def prompt_ids(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], tools: Optional[list[Any]] = None
) -> list[int]:
    """Ids of the conversation with the assistant's header opened; template errors pass through."""
    text = tokenizer.apply_chat_template(list(messages), tools=tools, tokenize=False, add_generation_prompt=True)
    return list(tokenizer.encode(text, add_special_tokens=False))


def takes_tools(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the chat template writes tools into the prompt: many leave them out without a word."""
    tool = {
        "type": "function",
        "function": {
            "name": _SENTINEL,
            "description": _SENTINEL,
            "parameters": {"type": "object", "properties": {}, "required": []},
        },
    }
    try:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": "?"}], tools=[tool], tokenize=False, add_generation_prompt=True
        )
    except (TemplateError, ValueError, TypeError, KeyError, AttributeError):
        return False
    return _SENTINEL in str(text)
