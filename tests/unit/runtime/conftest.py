"""Tiny seeded models for the runtime's tests."""

import os

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

EOS_ID = 2


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    torch.set_num_threads(1)


def make_llama(*, seed: int, num_layers: int = 2, vocab_size: int = 97, **overrides) -> PreTrainedModel:
    """A random Llama whose greedy output is varied (a wide initialisation)."""
    torch.manual_seed(seed)
    settings = {
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "initializer_range": 0.3,
        "bos_token_id": 1,
        "eos_token_id": EOS_ID,
        "pad_token_id": EOS_ID,
    }
    return LlamaForCausalLM(LlamaConfig(**{**settings, **overrides})).eval()


def greedy_by_hf(model: PreTrainedModel, prompt: list[int], max_new_tokens: int, **kwargs) -> list[int]:
    """What Transformers' own plain decoding gives."""
    out = model.generate(
        torch.tensor([prompt]), max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=EOS_ID, **kwargs
    )
    return out[0, len(prompt) :].tolist()


@pytest.fixture(scope="session")
def target() -> PreTrainedModel:
    return make_llama(seed=0, num_layers=3)


@pytest.fixture(scope="session")
def random_draft() -> PreTrainedModel:
    return make_llama(seed=5, num_layers=1)


@pytest.fixture(scope="session")
def near_draft(target) -> PreTrainedModel:
    """The target with a little noise on its weights: accepted often, not always."""
    draft = make_llama(seed=0, num_layers=3)
    torch.manual_seed(9)
    with torch.no_grad():
        for weight in draft.parameters():
            weight.add_(0.02 * torch.randn_like(weight))
    return draft


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    torch.manual_seed(1)
    return [torch.randint(3, 97, (n,)).tolist() for n in (5, 9, 1, 30, 3, 70, 12, 17, 4, 2)]


@pytest.fixture(scope="session")
def hf_greedy():
    return greedy_by_hf


@pytest.fixture(scope="session")
def llama():
    return make_llama
