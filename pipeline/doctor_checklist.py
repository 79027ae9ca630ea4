"""The doctor's checklist: every check by name, with what was found or what was seen to be right."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rich.markup import escape
from rich.table import Table
from transformers import PreTrainedConfig

from pipeline.compat import ERROR, WARNING, Finding, context_length
from pipeline.pair import Parts

OK, NOT_CHECKED = "ok", "not checked"
CHAT, FINITE = "chat template", "weights finite"
UNREADABLE = ("broken_shard", "missing_weights", "pickle_weights")
STYLES = {OK: "green", WARNING: "yellow", ERROR: "bold red", NOT_CHECKED: "dim"}


@dataclass(frozen=True)
class Check:
    """One line of the list: its name, the finding codes that belong to it, and what has to be readable for it."""

    name: str
    codes: tuple[str, ...]
    needs: tuple[str, ...] = ()


CHECKS = (
    Check("model folders", ("missing_model", "broken_config", "broken_generation_config", "architecture")),
    Check("token-to-id maps", ("tokenizer", "broken_tokenizer", "tokenization"), ("tokenizer",)),
    Check("special tokens", ("special_tokens", "special_ids"), ("tokenizer",)),
    Check("vocabulary width", ("vocab_size", "vocab_padding"), ("config", "tokenizer")),
    Check("context length", ("context_length",), ("config",)),
    Check(CHAT, ("chat_template", "chat_template_differs"), ("tokenizer",)),
    Check("no penalties by default", ("penalty",)),
    Check("head and KV shapes", ("head_shape", "untied_head"), ("config",)),
    Check("weight files whole", ("missing_weights", "broken_shard", "two_weights", "pickle_weights", "unloadable")),
    Check(FINITE, ("non_finite_weights",)),
)


@dataclass(frozen=True)
class Line:
    """A check's outcome: ok, warning, error or not checked."""

    name: str
    status: str
    messages: tuple[str, ...]


def checklist(findings: Iterable[Finding], parts: Mapping[str, Parts], *, chat: bool = True) -> list[Line]:
    """One line per check, in a fixed order; a check that could not be made, or was not asked for, is no `ok`."""
    found = list(findings)
    known = {code for check in CHECKS for code in check.codes}
    assert all(finding.code in known for finding in found), found
    lines = [_line(check, found, parts) for check in CHECKS]
    if not chat:
        lines = [
            Line(line.name, NOT_CHECKED, ("plain text was asked for",)) if line.name == CHAT else line
            for line in lines
        ]
    return lines


def _line(check: Check, findings: list[Finding], parts: Mapping[str, Parts]) -> Line:
    own = [finding for finding in findings if finding.code in check.codes]
    if own:
        status = ERROR if any(finding.severity == ERROR for finding in own) else WARNING
        return Line(check.name, status, tuple(finding.message for finding in own))
    unread = [
        f"the {who}'s {part} cannot be read"
        for who, side in parts.items()
        for part in check.needs
        if getattr(side, part) is None
    ]
    if check.name == FINITE and any(finding.code in UNREADABLE for finding in findings):
        unread = ["not every weight file can be read"]
    if unread:
        return Line(check.name, NOT_CHECKED, (unread[0],))
    return Line(check.name, OK, tuple(_seen(check.name, parts)))


def _seen(name: str, parts: Mapping[str, Parts]) -> list[str]:
    """The values behind an `ok`, where they say more than the word."""
    configs = {who: side.config for who, side in parts.items() if side.config is not None}
    if len(configs) < 2:
        return []
    target, draft = configs["target"], configs["draft"]
    if name == "vocabulary width":
        return [f"{target.get_text_config().vocab_size} rows on both sides"]
    if name == "context length":
        return [f"target {_context(target)}; draft {_context(draft)}"]
    if name == "head and KV shapes":
        return [f"target {_shape(target)}; draft {_shape(draft)}"]
    return []


def _context(config: PreTrainedConfig) -> str:
    rope = getattr(config.get_text_config(), "rope_parameters", None)
    rotary = ""
    if isinstance(rope, dict) and "rope_theta" in rope:
        rotary = f" (rope {rope.get('rope_type', 'default')}, theta {rope['rope_theta']:g})"
    return f"{context_length(config) or 'unlimited'} positions{rotary}"


def _shape(config: PreTrainedConfig) -> str:
    text = config.get_text_config()
    heads = getattr(text, "num_attention_heads", None)
    if not heads:
        return "without attention heads"
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    size = getattr(text, "head_dim", None) or text.hidden_size // heads
    return f"{heads} heads of {size}, {kv_heads} for keys and values"


def checklist_table(lines: Iterable[Line]) -> Table:
    """As it is printed."""
    table = Table("check", "status", "what was found", title="the pair")
    for line in lines:
        style = STYLES[line.status]
        table.add_row(line.name, f"[{style}]{line.status}[/]", escape("\n".join(line.messages)))
    return table
