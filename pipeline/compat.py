"""Do a target and a draft fit together? Every check gives findings with the way out; none loads a whole model.

Same vocabulary size says nothing about same tokens (vLLM issue 42775, SGLang issue 24051), and another size may still be the same
tokens with padding rows (TRL issue 3028), so maps are compared, not sizes.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

ERROR, WARNING = "error", "warning"

#: Neutral values of the generation settings that change the logits; anything else makes q another distribution.
NEUTRAL_GENERATION: dict[str, tuple[object, ...]] = {
    "repetition_penalty": (None, 1.0),
    "encoder_repetition_penalty": (None, 1.0),
    "no_repeat_ngram_size": (None, 0),
    "encoder_no_repeat_ngram_size": (None, 0),
    "diversity_penalty": (None, 0.0),
    "exponential_decay_length_penalty": (None,),
    "bad_words_ids": (None, []),
    "sequence_bias": (None, {}, []),
    "suppress_tokens": (None, []),
    "begin_suppress_tokens": (None, []),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
    "min_length": (None, 0),
    "min_new_tokens": (None, 0),
    "guidance_scale": (None, 1.0),
    "watermarking_config": (None,),
}
MAX_VLLM_HEAD_SIZE = 256


@dataclass(frozen=True)
class Finding:
    """One thing that was found: `severity` is 'error' (it cannot work) or 'warning'; `message` names the way out."""

    code: str
    severity: str
    message: str


def errors(findings: Iterable[Finding]) -> list[Finding]:
    """The findings that forbid going on."""
    return [finding for finding in findings if finding.severity == ERROR]


def raise_on_errors(findings: Iterable[Finding]) -> None:
    """Raise one ValueError with every error's message."""
    if found := errors(findings):
        raise ValueError("\n".join(finding.message for finding in found))


def demote(findings: Iterable[Finding], codes: Iterable[str]) -> list[Finding]:
    """The findings, with errors of these codes turned into warnings: what a later step mends."""
    mended = set(codes)
    return [replace(finding, severity=WARNING) if finding.code in mended else finding for finding in findings]


def check_vocab_size(vocab_size_target: int, vocab_size_draft: int, max_token_id: int) -> list[Finding]:
    """Both heads must hold every token id, and be of one width: vLLM's `draft_model` refuses two (vLLM issue 7252)."""
    for who, size in (("target", vocab_size_target), ("draft", vocab_size_draft)):
        if size <= max_token_id:
            return [
                Finding(
                    "vocab_size",
                    ERROR,
                    f"the {who}'s vocab_size is {size}, but its tokenizer has ids up to {max_token_id}: "
                    "resize the model's embeddings to the tokenizer, or use the tokenizer that it was trained with",
                )
            ]
    if vocab_size_target == vocab_size_draft:
        return []
    return [
        Finding(
            "vocab_padding",
            ERROR,
            f"same tokens, but vocab_size is {vocab_size_target} in the target and {vocab_size_draft} in the draft (padding): "
            "vLLM refuses the pair. Export pads or trims the draft to the target's width",
        )
    ]


def context_length(config: PreTrainedConfig) -> int | None:
    """Positions that the model was made for, or None where its config sets no limit."""
    value = getattr(config.get_text_config(), "max_position_embeddings", None)
    return int(value) if isinstance(value, int) and value > 0 else None


def _served_length(config: PreTrainedConfig) -> int | None:
    """`context_length`, or what YaRN stretches it to: its settings are added without a word in `max_position_embeddings`."""
    length, rope = context_length(config), getattr(config.get_text_config(), "rope_parameters", None) or {}
    if length is None or rope.get("rope_type") != "yarn":
        return length
    original = rope.get("original_max_position_embeddings") or length
    return max(length, int(original * (rope.get("factor") or 1.0)))


def check_context_length(target: PreTrainedConfig, draft: PreTrainedConfig) -> list[Finding]:
    """A draft that ends before its target collapses or crashes there (SpecForge issue 271, vLLM issue 58080)."""
    length_target, length_draft = _served_length(target), _served_length(draft)
    if length_draft is None or (length_target is not None and length_draft >= length_target):
        return []
    return [
        Finding(
            "context_length",
            ERROR,
            f"the draft reads {length_draft} positions and the target {length_target or 'any number of'}: from position "
            f"{length_draft} on there is no speculation (native runtime) or a failure (other engines). Serve with a context of "
            f"at most {length_draft}, "
            "or choose a draft with the target's context length",
        )
    ]


def check_rope(target: PreTrainedConfig, draft: PreTrainedConfig) -> list[Finding]:
    """For layers copied from the target: the rotary settings must be the target's, or the copies see other positions."""
    rope_target, rope_draft = (
        getattr(config.get_text_config(), "rope_parameters", None) for config in (target, draft)
    )
    if rope_target == rope_draft:
        return []
    return [
        Finding(
            "rope",
            WARNING,
            f"rotary settings differ: target {rope_target}, draft {rope_draft}. "
            "Right for a draft of its own family, wrong for layers copied from the target",
        )
    ]


def check_shapes(draft: PreTrainedConfig) -> list[Finding]:
    """Head counts and sizes that serving engines take."""
    text = draft.get_text_config()
    if getattr(draft, "is_encoder_decoder", False):
        return [
            Finding(
                "architecture",
                ERROR,
                f"{draft.model_type} is an encoder-decoder; a draft is a causal language model",
            )
        ]
    if not getattr(text, "num_attention_heads", None):
        message = (
            f"{draft.model_type} names no attention heads: without a cache that can be cut back after a rejected token, "
            "engines may refuse it as a draft"
        )
        return [Finding("head_shape", WARNING, message)]
    num_heads = int(text.num_attention_heads)
    num_kv_heads = int(getattr(text, "num_key_value_heads", None) or num_heads)
    head_size = int(getattr(text, "head_dim", None) or text.hidden_size // num_heads)
    findings = []
    if num_heads % num_kv_heads:
        findings.append(
            Finding(
                "head_shape",
                ERROR,
                f"{num_heads} attention heads are not a multiple of {num_kv_heads} key-value heads: no engine shares them evenly",
            )
        )
    if head_size % 8 or head_size > MAX_VLLM_HEAD_SIZE:
        findings.append(
            Finding(
                "head_shape",
                WARNING,
                f"head size {head_size}: vLLM's attention kernels take multiples of 8 up to {MAX_VLLM_HEAD_SIZE}; "
                "this draft may be refused there",
            )
        )
    return findings


def check_generation_config(settings: Mapping[str, Any], *, who: str = "draft") -> list[Finding]:
    """A penalty hidden in generation_config.json: q is no longer the model's own distribution."""
    active = {
        name: settings[name]
        for name, neutral in NEUTRAL_GENERATION.items()
        if name in settings and settings[name] not in neutral
    }
    if not active:
        return []
    return [
        Finding(
            "penalty",
            ERROR if who == "draft" else WARNING,
            f"the {who}'s generation settings (generation_config.json) have {active}: that changes the logits behind "
            "the sampler's back. Remove it there, and ask for penalties per request",
        )
    ]


def generation_settings(folder: Path) -> dict[str, Any]:
    """What `generate` takes its defaults from: generation_config.json, or config.json where an old folder has only that.

    Raises ValueError when the file is no JSON object.
    """
    name = "generation_config.json" if (folder / "generation_config.json").is_file() else "config.json"
    return read_json(folder / name)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file, {} when the file is missing. Raises ValueError when it is no JSON object."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not readable JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, expected an object")
    return content
