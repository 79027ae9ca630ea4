"""Tiny seeded models and corpus rows for the distillation tests."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from datasets import Dataset, Features, List, Value
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB, NUM_CACHED = 61, 8
FEATURES = Features(
    {
        "prompt_id": Value("string"),
        "prompt_token_ids": List(Value("int32")),
        "response_token_ids": List(Value("int32")),
        "topk_ids": List(List(Value("int32"))),
        "topk_logprobs": List(List(Value("float16"))),
    }
)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


def make_llama(num_layers: int = 4, seed: int = 0, vocab_size: int = VOCAB, std: float = 0.25) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=32, intermediate_size=48, num_hidden_layers=num_layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=True, initializer_range=std,
        bos_token_id=1, eos_token_id=2, pad_token_id=2,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def llama() -> Callable[..., LlamaForCausalLM]:
    return make_llama


@pytest.fixture
def rows() -> Callable[..., Dataset]:
    return make_rows


def make_rows(
    target: LlamaForCausalLM | None = None, num_rows: int = 12, seed: int = 0, num_cached: int = NUM_CACHED
) -> Dataset:
    """Random prompts and responses that end in EOS (= pad, id 2), with the target's own top-k when it is given."""
    random = np.random.default_rng(seed)
    columns: dict[str, list] = {name: [] for name in FEATURES}
    for index in range(num_rows):
        prompt = random.integers(3, VOCAB, random.integers(1, 7)).tolist()
        response = [*random.integers(3, VOCAB, random.integers(2, 14)).tolist(), 2]
        columns["prompt_id"].append(f"{seed}-{index}")
        columns["prompt_token_ids"].append(prompt)
        columns["response_token_ids"].append(response)
        logits = torch.from_numpy(random.normal(size=(len(response), VOCAB)) * 2).float()
        if target is not None:
            with torch.no_grad():
                logits = target(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].float()
        top = torch.log_softmax(logits, -1).topk(num_cached)
        columns["topk_ids"].append(top.indices.tolist())
        columns["topk_logprobs"].append(top.values.half().tolist())
    return Dataset.from_dict(columns, features=FEATURES)
