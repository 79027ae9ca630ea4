"""Tiny seeded models and rows for the tests of `eval`."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.set_num_threads(1)

MakeModel = Callable[..., LlamaForCausalLM]
VOCAB_SIZE = 40


@pytest.fixture(scope="session")
def make_model() -> MakeModel:
    """`make_model(seed, num_layers=2, vocab_size=40, **config)`: an fp32 Llama of peaked predictions."""

    def make(seed: int, num_layers: int = 2, vocab_size: int = VOCAB_SIZE, **config: Any) -> LlamaForCausalLM:
        torch.manual_seed(seed)
        defaults = {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 128,
            "eos_token_id": 2,
            "pad_token_id": 2,
            "bos_token_id": 1,
            "initializer_range": 0.3,
        }
        model_config = LlamaConfig(
            vocab_size=vocab_size, num_hidden_layers=num_layers, **{**defaults, **config}
        )
        return LlamaForCausalLM(model_config).eval()

    return make


@pytest.fixture(scope="session")
def make_rows() -> Callable[..., list[dict[str, Any]]]:
    """`make_rows(num_rows, seed=0, temperatures=(0.0, 1.0))`: corpus rows of random ids, without EOS."""

    def make(
        num_rows: int, seed: int = 0, temperatures: tuple[float, ...] = (0.0, 1.0)
    ) -> list[dict[str, Any]]:
        generator = torch.Generator().manual_seed(seed)

        def ids(low: int, high: int) -> list[int]:
            length = int(torch.randint(low, high, (1,), generator=generator))
            return torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist()

        return [
            {
                "prompt_id": f"prompt-{i}",
                "source": "ab"[i % 2],
                "prompt_token_ids": ids(1, 12),
                "response_token_ids": ids(1, 20),
                "temperature": temperatures[i % len(temperatures)],
            }
            for i in range(num_rows)
        ]

    return make
