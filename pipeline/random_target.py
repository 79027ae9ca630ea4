"""A seeded random Llama with a small byte-level BPE tokenizer, made on the spot: the target of tests and trials."""

import hashlib
import itertools
import json
import os
import shutil
import string
from dataclasses import asdict
from pathlib import Path

import torch
from filelock import FileLock
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from pipeline.schema import RandomModelConfig

VERSION = 1
# In the order of the embedded target's ids: <|im_end|> ends a turn and is the pad token too.
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
BOS_ID, EOS_ID = 1, 2
# A random head ends a text once in vocab_size tokens; a longer row for EOS makes both finish reasons occur.
EOS_ROW_SCALE = 3.0
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' ~ message['role']) }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_LETTERS_BY_FREQUENCY = "etaoinsrhldcumfpgwybvkxjqz"


def obtain_random_target(config: RandomModelConfig, models_dir: Path) -> Path:
    """Return `models_dir/random-<hash of config>`, made and saved first if it is not there.

    Raises:
        ValueError: sizes that do not fit together, or a folder that cannot be written.
    """
    identity = json.dumps({"version": VERSION, **asdict(config)}, sort_keys=True)
    folder = models_dir / f"random-{hashlib.sha256(identity.encode()).hexdigest()[:12]}"
    if folder.is_dir():
        return folder
    tokenizer = build_tokenizer(config.vocab_size)
    model = build_model(config)
    try:
        models_dir.mkdir(parents=True, exist_ok=True)
        with FileLock(models_dir / f"{folder.name}.lock"):
            if not folder.is_dir():
                temporary = models_dir / f"{folder.name}.incomplete"
                shutil.rmtree(temporary, ignore_errors=True)
                model.save_pretrained(temporary)
                tokenizer.save_pretrained(temporary)
                os.rename(temporary, folder)
    except OSError as error:
        raise ValueError(
            f"artifacts_dir={str(models_dir.parent)!r}: the random target cannot be saved: {error}"
        ) from error
    return folder


def build_model(config: RandomModelConfig) -> LlamaForCausalLM:
    """A float32 Llama with tied embeddings, the same for the same config on every machine."""
    if config.hidden_size % config.num_heads or config.num_heads % config.num_kv_heads:
        raise ValueError(
            f"target.random: hidden_size={config.hidden_size} must be a multiple of num_heads={config.num_heads}, "
            f"and that of num_kv_heads={config.num_kv_heads}"
        )
    llama = LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        max_position_embeddings=config.max_position_embeddings,
        initializer_range=config.initializer_range,
        tie_word_embeddings=True,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=EOS_ID,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = LlamaForCausalLM(llama).float()
        with torch.no_grad():
            # Transformers skips the padding row at initialisation, and pad is EOS here.
            model.get_input_embeddings().weight[EOS_ID].normal_(std=config.initializer_range * EOS_ROW_SCALE)
    model.generation_config = GenerationConfig(bos_token_id=BOS_ID, eos_token_id=EOS_ID, pad_token_id=EOS_ID)
    return model.eval()


def build_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """A lossless byte-level BPE of exactly `vocab_size` ids: special tokens, 256 bytes, then pairs of letters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    ranked = itertools.product(range(len(_LETTERS_BY_FREQUENCY)), repeat=2)
    pairs = [
        (_LETTERS_BY_FREQUENCY[a], _LETTERS_BY_FREQUENCY[b])
        for a, b in sorted(ranked, key=lambda ab: (sum(ab), ab))
    ]
    merges = [("Ġ", letter) for letter in string.ascii_letters] + pairs
    num_base = len(SPECIAL_TOKENS) + len(alphabet)
    if not num_base <= vocab_size <= num_base + len(merges):
        raise ValueError(
            f"target.random.vocab_size={vocab_size}: choose {num_base} to {num_base + len(merges)}"
        )
    merges = merges[: vocab_size - num_base]
    tokens = [*SPECIAL_TOKENS, *alphabet, *(left + right for left, right in merges)]
    tokenizer = Tokenizer(
        models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    unknown, begin, end = SPECIAL_TOKENS
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token=unknown,
        bos_token=begin,
        eos_token=end,
        pad_token=end,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
