"""Equality of tokenizers is proved by their maps, not by their sizes."""

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from distill.tokenizers import require_same_tokenizer

WORDS = ["<unk>", "<s>", "</s>", "a", "b", "c", "d"]


def tokenizer(words: list[str], **special: str) -> PreTrainedTokenizerFast:
    vocab = {word: index for index, word in enumerate(words)}
    roles = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", **special}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocab, unk_token="<unk>")), **roles)


def test_equal_tokenizers_pass_whatever_pads() -> None:
    require_same_tokenizer(tokenizer(WORDS), tokenizer(list(WORDS)))
    require_same_tokenizer(tokenizer(WORDS, pad_token="</s>"), tokenizer(WORDS))


def test_same_size_other_ids_is_refused_by_name() -> None:
    """vllm 7252, 42775: the same vocabulary size proves nothing; the first differing tokens are named."""
    with pytest.raises(ValueError, match=r"2 tokens have other ids.*'b' \(target 4, draft 6\).*'d' \(target 6, draft 4\)"):
        require_same_tokenizer(tokenizer(WORDS), tokenizer([*WORDS[:4], "d", "c", "b"]))


def test_longer_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'e' \(target has none, draft 7\)"):
        require_same_tokenizer(tokenizer(WORDS), tokenizer([*WORDS, "e"]))


def test_other_special_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="eos_token .*'</s>'.*'d'"):
        require_same_tokenizer(tokenizer(WORDS), tokenizer(WORDS, eos_token="d"))
