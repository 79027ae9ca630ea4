"""vLLM as one of the benchmark's backends: which conditions it gets, and what its engines are made from."""

from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from eval import bench_conditions
from eval.bench_conditions import BackendFactory, Condition, conditions_at
from eval.config import BenchConfig
from eval.teacher_forcing import Draft
from specdec_runtime.config import DecoderConfig


def tiny(name: str) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    model = LlamaForCausalLM(config)
    model.name_or_path = name
    return model


def test_vllm_is_a_baseline_and_runs_every_gamma() -> None:
    config = BenchConfig(backends=["vllm", "native"], gammas=[1, 2], batch_sizes=[4])
    conditions = conditions_at(config, ["distilled"], temperature=1.0, batch=4)
    of_vllm = [(c.draft, c.gamma, c.batch) for c in conditions if c.backend == "vllm"]
    assert of_vllm == [("none", 0, 4), ("distilled", 1, 4), ("distilled", 2, 4)]


def test_engines_are_made_from_folders_and_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """One per draft and gamma, whatever the temperature and batch: loading takes a minute."""
    made: list[tuple[Any, ...]] = []

    def fake(target: str, draft: str | None, **settings: Any) -> object:
        made.append((target, draft, settings))
        return object()

    monkeypatch.setattr(bench_conditions, "VLLMBackend", fake)
    runtime = DecoderConfig(sampler="greedy")
    factory = BackendFactory(tiny("/models/t"), {"distilled": Draft(tiny("/models/d"))}, runtime)
    drafted = [
        factory.backend_of(Condition("vllm", "distilled", 3, temperature, batch))
        for temperature in (0.0, 1.0)
        for batch in (1, 8)
    ]
    plain = factory.backend_of(Condition("vllm", "none", 0, 0.0, 1))
    assert all(backend is drafted[0] for backend in drafted) and plain is not drafted[0]
    settings = {"sampler": "greedy", "dtype": "float32"}
    assert made == [
        ("/models/t", "/models/d", {"num_speculative_tokens": 3, **settings}),
        ("/models/t", None, {"num_speculative_tokens": 0, **settings}),
    ]


def test_random_weights_have_no_folder() -> None:
    with pytest.raises(ValueError, match=r"bench\.backends.*folders"):
        BenchConfig(target="random:llama3_8b", backends=["native", "vllm"])
