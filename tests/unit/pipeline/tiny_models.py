"""Seeded random models of several families with a tokenizer made on the spot, small enough to save and load in a blink."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

NUM_TOKENS = 96
FAMILIES = (
    "llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "gpt2", "phi", "phi3", "mistral"
)  # fmt: skip
TEMPLATE = "{% for message in messages %}<s>{{ message['content'] }}</s>{% endfor %}"


def make_tokenizer(
    *, num_tokens: int = NUM_TOKENS, swap: bool = False, eos: str = "</s>", template: str | None = TEMPLATE
) -> PreTrainedTokenizerFast:
    """Word-level: `w3`, `w4`, ... with <s>, </s>, <unk> first. `swap` exchanges two words' ids: same size, other tokens."""
    words = ["<unk>", "<s>", "</s>", *(f"w{i}" for i in range(3, num_tokens))]
    if swap:
        words[10], words[20] = words[20], words[10]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="<unk>", bos_token="<s>", eos_token=eos, pad_token="</s>"
    )
    tokenizer.chat_template = template
    return tokenizer


def make_model(
    family: str = "llama",
    *,
    vocab_size: int = NUM_TOKENS,
    num_layers: int = 2,
    tied: bool | None = None,
    context: int = 128,
    rope: dict[str, object] | None = None,
    seed: int = 0,
) -> PreTrainedModel:
    """fp32, eval mode, hidden size 32, 4 heads of size 8 with 2 key-value heads where the family has them."""
    settings: dict[str, object] = {
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": context,
        "head_dim": 8,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }
    if family == "gpt2":
        settings = {
            "vocab_size": vocab_size,
            "n_embd": 32,
            "n_layer": num_layers,
            "n_head": 4,
            "n_positions": context,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 2,
        }
    if family in ("phi", "phi3"):
        settings.pop("head_dim")
    if rope is not None:
        settings["rope_parameters"] = rope
    if tied is not None:
        settings["tie_word_embeddings"] = tied
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings), dtype=torch.float32)
    # Wider weights than the families' 0.02: greedy choices then hang on the context, and rounding decides none.
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.2)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.1)
    return model.eval()


def save(
    folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast | None = None, **kwargs: object
) -> Path:
    """Both into one folder."""
    model.save_pretrained(folder, **kwargs)
    (tokenizer or make_tokenizer()).save_pretrained(folder)
    return folder
