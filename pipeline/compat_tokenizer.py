"""Do two tokenizers give ids the same meaning, and do both sides know how a chat is written and where a text ends?"""

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase

from distill.tokenizers import require_same_tokenizer
from pipeline.compat import ERROR, WARNING, Finding

#: Words, digits, spaces, lines, accents, other scripts and symbols: what normalisers and pre-tokenizers treat differently.
SAMPLE_TEXTS = (
    "The quick brown fox jumps over 13 lazy dogs.",
    "  def f(x):\n\treturn x ** 2  # 3.14159\n\n",
    "Ünïcödé naïve café — “quotes”, ½ and 日本語 русский",
)


def check_tokenizers(target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase) -> list[Finding]:
    """Token-to-id maps and special tokens must be equal; the message names the first that are not."""
    try:
        require_same_tokenizer(target, draft)
    except ValueError as error:
        same_map = target.get_vocab() == draft.get_vocab()
        return [Finding("special_tokens" if same_map else "tokenizer", ERROR, str(error))]
    return []


def check_tokenization(target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase) -> list[Finding]:
    """One vocabulary, but texts cut differently: other merges, normaliser or pre-tokenizer.

    A warning only: engines cut texts with the target's tokenizer and hand ids to the draft.
    """
    for text in SAMPLE_TEXTS:
        ids_target, ids_draft = (one.encode(text, add_special_tokens=False) for one in (target, draft))
        if ids_target != ids_draft:
            message = (
                f"same tokens, but the draft's tokenizer cuts {text!r} into {ids_draft[:8]}... and the target's into "
                f"{ids_target[:8]}...: it was trained on other pieces, which lowers acceptance"
            )
            return [Finding("tokenization", WARNING, message)]
    return []


def check_chat_template(tokenizer: PreTrainedTokenizerBase, *, who: str) -> list[Finding]:
    """Chat asks for a template, and for one that can write a question: the target's is what engines write prompts with."""
    if tokenizer.chat_template:
        return _check_question(tokenizer) if who == "target" else []
    way_out = (
        "use a chat model, or work on plain text (target.chat=false; for the doctor --plain-text)"
        if who == "target"
        else "copy the target's chat_template.jinja into the draft's folder"
    )
    return [
        Finding(
            "chat_template",
            ERROR,
            f"the {who} has no chat template, and chat is asked for: {way_out}",
        )
    ]


def _check_question(tokenizer: PreTrainedTokenizerBase) -> list[Finding]:
    messages = [{"role": "user", "content": "Why?"}]
    try:
        tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # Jinja's own, and whatever the template's expressions raise
        message = (
            f"the target's chat template cannot write a plain question ({type(error).__name__}: {error}): mend it, or work on plain "
            "text (target.chat=false; for the doctor --plain-text)"
        )
        return [Finding("chat_template", ERROR, message)]
    return []


def check_chat_templates(target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase) -> list[Finding]:
    """Both have one; a draft with another one was trained on other prompts, which is worth a warning."""
    findings = check_chat_template(target, who="target") + check_chat_template(draft, who="draft")
    if findings or target.chat_template == draft.chat_template:
        return findings
    message = (
        "the draft's chat template is not the target's: engines write prompts with the target's, and a draft that was trained "
        "with another one proposes worse"
    )
    return [Finding("chat_template_differs", WARNING, message)]


def check_special_ids(target: Mapping[str, Any], draft: Mapping[str, Any]) -> list[Finding]:
    """The ids that end a text, from generation_config.json or config.json: swapped with another role, or some missing.

    Assisted generation stops proposing at the draft's own EOS, so a draft that takes another token for it is cut at that one.
    """
    eos_target, eos_draft = _ids(target.get("eos_token_id")), _ids(draft.get("eos_token_id"))
    if not eos_target or not eos_draft or eos_target == eos_draft:
        return []
    if eos_target & eos_draft:
        if eos_draft <= eos_target:
            return []
        severity = WARNING
    else:
        severity = ERROR
    message = (
        f"eos_token_id is {sorted(eos_target)} for the target and {sorted(eos_draft)} for the draft (generation_config.json, or "
        "config.json where that has none): set the draft's to the target's"
    )
    return [Finding("special_ids", severity, message)]


def _ids(value: Any) -> set[int]:
    if value is None:
        return set()
    return {int(value)} if isinstance(value, int) else {int(one) for one in value}
