"""The whole checklist for one target and one draft, from their folders or Hugging Face ids."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase

from pipeline import compat
from pipeline.compat import ERROR, Finding
from pipeline.weight_files import check_weight_files

#: What export mends when it writes the trained draft, so no reason to refuse a draft to start from.
MENDED_BY_EXPORT = ("vocab_padding", "chat_template", "penalty", "context_length", "head_shape")

Loaded = TypeVar("Loaded")


def check_pair(
    target: str | Path,
    draft: str | Path,
    *,
    chat: bool = True,
    check_values: bool = True,
    trust_remote_code: bool = False,
) -> list[Finding]:
    """Findings for a pair as it would be served now. Folders are read as they are; ids go through the Hugging Face cache.

    Args:
        chat: a chat template is asked for on both sides.
        check_values: read the draft's weights and look for NaN and infinity (the target's files are opened, not read).
    """
    findings: list[Finding] = []
    configs, tokenizers = {}, {}
    for who, path in (("target", target), ("draft", draft)):
        found, config, tokenizer = _load_parts(path, who=who, trust_remote_code=trust_remote_code)
        findings += found
        configs[who], tokenizers[who] = config, tokenizer
        if Path(path).is_dir():
            findings += check_weight_files(Path(path), who=who, check_values=check_values and who == "draft")
            try:
                findings += compat.check_generation_config(
                    compat.read_json(Path(path) / "generation_config.json"), who=who
                )
            except ValueError as error:
                findings.append(Finding("broken_config", ERROR, f"the {who}'s {error}"))
    findings += _compare_tokenizers(tokenizers["target"], tokenizers["draft"], chat=chat)
    findings += _compare_configs(configs["target"], configs["draft"], tokenizers["target"])
    return findings


def check_start_draft(
    target: str | Path, draft: str | Path, *, trust_remote_code: bool = False
) -> list[Finding]:
    """The same checklist for a draft that will be trained and exported: what export mends is a warning."""
    findings = check_pair(target, draft, chat=False, trust_remote_code=trust_remote_code)
    return compat.demote(findings, MENDED_BY_EXPORT)


def _load_parts(
    path: str | Path,
    *,
    who: str,
    trust_remote_code: bool,
) -> tuple[list[Finding], PreTrainedConfig | None, PreTrainedTokenizerBase | None]:
    looks_local = str(path).startswith((".", "/", "~")) or str(path).count("/") > 1
    if looks_local and not Path(path).is_dir():
        return [Finding("missing_model", ERROR, f"the {who}'s folder {path} does not exist")], None, None
    findings: list[Finding] = []

    def load(what: str, loader: Callable[[], Loaded]) -> Loaded | None:
        try:
            return loader()
        except (
            Exception
        ) as error:  # transformers raises many kinds for one broken file; all of them are a finding here
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            findings.append(
                Finding(f"broken_{what}", ERROR, f"the {who}'s {what} in {path} cannot be loaded: {reason}")
            )
            return None

    config = load("config", lambda: AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code))
    tokenizer = load(
        "tokenizer", lambda: AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    )
    return findings, config, tokenizer


def _compare_tokenizers(
    target: PreTrainedTokenizerBase | None, draft: PreTrainedTokenizerBase | None, *, chat: bool
) -> list[Finding]:
    if target is None or draft is None:
        return []
    findings = compat.check_tokenizers(target, draft)
    if chat:
        findings += compat.check_chat_template(target, who="target") + compat.check_chat_template(
            draft, who="draft"
        )
    return findings


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
