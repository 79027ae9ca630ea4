"""Tiny seeded models in shapes that vLLM's CPU attention takes (head size 32), saved with a tokenizer."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

NUM_TOKENS = 96
EOS_ID = 2
TEMPLATE = "{% for message in messages %}<s> {{ message['content'] }} {% endfor %}"


def tiny_llama(*, seed: int, num_layers: int, noise: float = 0.0) -> LlamaForCausalLM:
    """fp32; weights wide enough that greedy choices hang on the context. `noise`: added to every weight."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=NUM_TOKENS, hidden_size=64, intermediate_size=128, num_hidden_layers=num_layers,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, max_position_embeddings=256,
        bos_token_id=1, eos_token_id=EOS_ID, pad_token_id=EOS_ID, initializer_range=0.25, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(noise * torch.randn_like(weight))
    return model


def save(folder: Path, model: LlamaForCausalLM) -> Path:
    """Model and a word-level tokenizer (`w3`, `w4`, ...) in one folder."""
    words = ["<unk>", "<s>", "</s>", *(f"w{i}" for i in range(3, NUM_TOKENS))]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )
    tokenizer.chat_template = TEMPLATE
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
