"""Prompt files and templates, shared by the tests of the sources."""

import copy
import json
from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from pipeline.corpus.accounting import Accounting
from pipeline.corpus.mixture import PromptStream
from pipeline.corpus.rows import Prompt
from tests.unit.pipeline.corpus_samples import tiny_config, tiny_tokenizer

#: Writes tools, tool calls and tool results, as Qwen's and Llama's templates do.
TOOL_TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n{% for tool in tools %}{{ tool.function.name }}: {{ tool | tojson }}\n{% endfor %}<|im_end|>\n"
    "{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for call in m.tool_calls or [] %}"
    "CALL {{ call.function.name }} {{ call.function.arguments | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def with_template(template: str | None) -> PreTrainedTokenizerFast:
    """The tiny tokenizer with another chat template."""
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.chat_template = template
    return tokenizer


def load(
    path: Path | str | None, tmp_path: Path, *, template: str | None = None, chat: bool = True, **corpus: object
) -> tuple[list[Prompt], Accounting]:
    """All prompts of a source, and their accounting."""
    accounting = Accounting()
    config = tiny_config(tmp_path, prompts=None if path is None else str(path), **corpus)
    config.target.chat = chat
    tokenizer = tiny_tokenizer() if template is None else with_template(template)
    return list(PromptStream(config, tokenizer, accounting)), accounting


def texts(prompts: Sequence[Prompt]) -> list[str]:
    """What the prompts say."""
    return [tiny_tokenizer().decode(prompt.token_ids) for prompt in prompts]


def chat(text: str) -> str:
    """A user's message in the tiny template."""
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


def write_jsonl(path: Path, rows: Sequence[object]) -> Path:
    """One row a line; a text is written as it is."""
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path
