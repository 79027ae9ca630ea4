"""The whole checklist for one target and one draft, from their folders or Hugging Face ids."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase

from pipeline import compat
from pipeline.compat import ERROR, Finding
from pipeline.compat_tokenizer import (
    check_chat_templates,
    check_special_ids,
    check_tokenization,
    check_tokenizers,
)
from pipeline.models import check_causal_lm, load_tokenizer
from pipeline.weight_files import check_weight_files

#: What export mends when it writes the trained draft, so no reason to refuse a draft to start from.
MENDED_BY_EXPORT = (
    "vocab_padding",
    "chat_template",
    "penalty",
    "context_length",
    "head_shape",
    "special_ids",
    "broken_generation_config",
)

Loaded = TypeVar("Loaded")


@dataclass(frozen=True)
class Parts:
    """What a model's folder says about its model; None or empty where it could not be read."""

    config: PreTrainedConfig | None = None
    tokenizer: PreTrainedTokenizerBase | None = None
    settings: dict[str, Any] = field(default_factory=dict)


def check_pair(
    target: str | Path,
    draft: str | Path,
    *,
    chat: bool = True,
    check_values: Collection[str] = ("draft",),
    trust_remote_code: bool = False,
) -> list[Finding]:
    """Findings for a pair as it would be served now. Folders are read as they are; ids go through the Hugging Face cache.

    Args:
        chat: a chat template is asked for on both sides.
        check_values: whose weights are read and searched for NaN and infinity; the other's files are opened, not read.
    """
    findings, _ = inspect_pair(
        target, draft, chat=chat, check_values=check_values, trust_remote_code=trust_remote_code
    )
    return findings


def inspect_pair(
    target: str | Path,
    draft: str | Path,
    *,
    chat: bool,
    check_values: Collection[str],
    trust_remote_code: bool = False,
) -> tuple[list[Finding], dict[str, Parts]]:
    """`check_pair`, with the configs and tokenizers that were read, under `target` and `draft`."""
    findings: list[Finding] = []
    parts = {}
    for who, path in (("target", target), ("draft", draft)):
        found, parts[who] = _load_parts(path, who=who, trust_remote_code=trust_remote_code)
        findings += found
        if Path(path).is_dir():
            findings += check_weight_files(Path(path), who=who, check_values=who in check_values)
            findings += compat.check_generation_config(parts[who].settings, who=who)
    of_target, of_draft = parts["target"], parts["draft"]
    if of_target.tokenizer is not None and of_draft.tokenizer is not None:
        found = check_tokenizers(of_target.tokenizer, of_draft.tokenizer)
        if not found and not _same_file(target, draft, "tokenizer.json"):
            found = check_tokenization(of_target.tokenizer, of_draft.tokenizer)
        findings += found
        if chat:
            findings += check_chat_templates(of_target.tokenizer, of_draft.tokenizer)
    findings += check_special_ids(of_target.settings, of_draft.settings)
    findings += _compare_configs(of_target.config, of_draft.config, of_target.tokenizer)
    return findings, parts


def check_start_draft(
    target: str | Path, draft: str | Path, *, trust_remote_code: bool = False
) -> list[Finding]:
    """The same checklist for a draft that will be trained and exported: what export mends is a warning."""
    findings = check_pair(target, draft, chat=False, trust_remote_code=trust_remote_code)
    named = [
        replace(
            finding,
            message=f"draft.path: {finding.message}, or leave draft.path null to copy the target's layers",
        )
        if finding.code in ("tokenizer", "special_tokens")
        else finding
        for finding in findings
    ]
    return compat.demote(named, MENDED_BY_EXPORT)


def _same_file(target: str | Path, draft: str | Path, name: str) -> bool:
    paths = [Path(folder) / name for folder in (target, draft)]
    return all(path.is_file() for path in paths) and paths[0].read_bytes() == paths[1].read_bytes()


def _load_parts(path: str | Path, *, who: str, trust_remote_code: bool) -> tuple[list[Finding], Parts]:
    looks_local = str(path).startswith((".", "/", "~")) or str(path).count("/") > 1
    if looks_local and not Path(path).is_dir():
        return [Finding("missing_model", ERROR, f"the {who}'s folder {path} does not exist")], Parts()
    findings: list[Finding] = []

    def load(what: str, loader: Callable[[], Loaded]) -> Loaded | None:
        try:
            return loader()
        except Exception as error:  # Transformers raises many kinds for one broken file; each is a finding here
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            findings.append(
                Finding(f"broken_{what}", ERROR, f"the {who}'s {what} in {path} cannot be loaded: {reason}")
            )
            return None

    is_folder = Path(path).is_dir()

    def load_config() -> PreTrainedConfig:
        if is_folder:
            check_causal_lm(Path(path), field=who, trust_remote_code=trust_remote_code)
        return AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)

    def load_own_tokenizer() -> PreTrainedTokenizerBase:
        # Where a folder has none, Transformers makes an empty one of some families, which then looks like another tokenizer.
        if is_folder:
            return load_tokenizer(str(path), trust_remote_code, field=who)
        return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)

    config = load("config", load_config)
    tokenizer = load("tokenizer", load_own_tokenizer)
    settings = load("generation_config", lambda: compat.generation_settings(Path(path))) or {}
    return findings, Parts(config, tokenizer, settings)


def _compare_configs(
    target: PreTrainedConfig | None, draft: PreTrainedConfig | None, tokenizer: PreTrainedTokenizerBase | None
) -> list[Finding]:
    if target is None or draft is None:
        return []
    findings = compat.check_context_length(target, draft) + compat.check_shapes(draft)
    if tokenizer is not None:
        max_token_id = max(tokenizer.get_vocab().values())
        findings += compat.check_vocab_size(
            target.get_text_config().vocab_size, draft.get_text_config().vocab_size, max_token_id
        )
    return findings
