"""What `lossless` says: equality in fp32, explained near ties in 16 bits, no with a synthetic rule."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from eval.bench import run_bench
from eval.bench_check import TokenChecker
from eval.bench_conditions import BackendFactory, Condition, conditions_at
from eval.bench_measure import Measurement
from eval.config import BenchConfig
from eval.teacher_forcing import Draft
from specdec_runtime import DecoderConfig, Output, Stats

PROMPTS = [[3, 4, 5], [9, 8, 7, 6], [30], [11, 12, 13, 14, 15]]


def measured(backend: str, tokens: list[list[int]], *, draft: str = "none", batch: int = 2) -> Measurement:
    gamma = 0 if draft == "none" else 2
    outputs = [Output(ids, "length", Stats()) for ids in tokens]
    return Measurement(Condition(backend, draft, gamma, 0.0, batch), outputs=outputs)


@pytest.fixture
def tied_target(make_model: Callable[..., PreTrainedModel]) -> PreTrainedModel:
    """Ids 7 and 20 have the same large head row, so wherever one is the best id the other is tied with it."""
    target = make_model(0)
    with torch.no_grad():
        target.lm_head.weight[7] = target.lm_head.weight[20] = 5 * target.lm_head.weight[20]
    return target


def first_tie(target: PreTrainedModel) -> int:
    """A one-id prompt after which 7 and 20 are best."""
    with torch.no_grad():
        return next(
            i for i in range(3, 40) if int(target(torch.tensor([[i]])).logits[0, -1].argmax()) in (7, 20)
        )


@pytest.mark.parametrize(("dtype", "is_lossless"), [(torch.float32, False), (torch.bfloat16, True)])
@pytest.mark.parametrize("backend", ["hf_assisted", "native"])
def test_a_difference_at_a_near_tie_is_allowed_in_16_bits_only(
    tied_target: PreTrainedModel, dtype: torch.dtype, is_lossless: bool, backend: str
) -> None:
    target = tied_target.to(dtype)
    prompts = [[first_tie(target)]]
    plain, other = measured("native", [[7]]), measured(backend, [[20]], draft="distilled")
    checker = TokenChecker(
        BackendFactory(target, {}, DecoderConfig()), prompts, BenchConfig(max_new_tokens=1), [plain, other]
    )
    checker._at_width[3] = [[7]]
    row = checker.check(other)
    assert row["mismatches"][0]["is_near_tie"]
    assert row["lossless"] is is_lossless
    assert checker.check(plain)["lossless"] is True


def test_in_fp32_the_tokens_must_be_those_of_hf_generate_too(
    make_model: Callable[..., PreTrainedModel],
) -> None:
    plain = measured("native", [[8, 9], [5, 6]])
    hf = measured("hf_generate", [[8, 9], [5, 4]])
    same = measured("native", [[8, 9], [5, 6]], draft="distilled")
    factory, config = BackendFactory(make_model(0), {}, DecoderConfig()), BenchConfig(max_new_tokens=2)
    checker = TokenChecker(factory, PROMPTS[:2], config, [plain, hf, same])
    checker._at_width[3] = [[8, 9], [5, 6]]
    row = checker.check(same)
    assert (row["lossless"], row["num_identical"], row["num_identical_hf_generate"]) == (False, 2, 1)
    assert checker.check(plain)["lossless"] is False
    alone = TokenChecker(factory, PROMPTS[:2], config, [plain, same])
    alone._at_width[3] = [[8, 9], [5, 6]]
    assert alone.check(same)["lossless"] is True


def test_all_conditions_are_exact_in_fp32_in_batches(make_model: Callable[..., PreTrainedModel]) -> None:
    config = BenchConfig(
        num_prompts=4, max_new_tokens=12, gammas=[3], auto_gamma=True, temperatures=[0.0], batch_sizes=[3],
        num_check_prompts=4, num_bootstrap=10, num_warmup_prompts=0,
    )  # fmt: skip
    rows = run_bench(make_model(0), {"distilled": Draft(make_model(1))}, PROMPTS, config).rows
    assert [row["lossless"] for row in rows] == [True] * 4
    assert {row["num_identical_hf_generate"] for row in rows} == {4}


def test_gamma_auto_is_a_condition_of_its_own(make_model: Callable[..., PreTrainedModel]) -> None:
    config = BenchConfig(gammas=[1, 3], auto_gamma=True, backends=["native", "hf_assisted"])
    found = conditions_at(config, ["distilled"], temperature=0.0, batch=4)
    assert [(c.gamma, c.gamma_policy) for c in found] == [
        (0, "fixed"),
        (1, "fixed"),
        (3, "fixed"),
        (3, "auto"),
    ]
    target = make_model(0)
    factory = BackendFactory(target, {"distilled": Draft(target)}, DecoderConfig())
    automatic: Any = factory.backend_of(found[-1])
    assert (automatic.decoder.config.gamma, automatic.decoder.config.num_speculative_tokens) == ("auto", 3)
    assert factory.backend_of(found[-2]) is not automatic


def test_a_synthetic_acceptance_marks_the_native_drafted_rows(
    make_model: Callable[..., PreTrainedModel],
) -> None:
    config = BenchConfig(
        num_prompts=2, max_new_tokens=20, gammas=[2], temperatures=[0.0], num_bootstrap=10, ignore_eos=True,
        backends=["native", "hf_assisted"],
    )  # fmt: skip
    runtime = DecoderConfig(acceptance="synthetic", synthetic_acceptance=1.0)
    rows = run_bench(make_model(0), {"d": Draft(make_model(1))}, PROMPTS, config, runtime=runtime).rows
    plain, native, assisted = rows
    assert (native["synthetic_acceptance"], native["lossless"], native["draft_acceptance_rate"]) == (
        1.0,
        False,
        1.0,
    )
    for row in (plain, assisted):
        assert "synthetic_acceptance" not in row
        assert row["lossless"] is True
