"""Differences between greedy outputs are found, placed and explained."""

from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

from eval.head import Head
from eval.lossless import find_mismatches, first_difference, near_tie_gap, top2_gap


def test_first_difference() -> None:
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2
    assert first_difference([1, 2, 3], []) == 0


@torch.no_grad()
def test_a_mismatch_has_the_targets_top_two_gap_at_its_position(
    make_model: Callable[..., PreTrainedModel],
) -> None:
    target = make_model(0)
    prompts, plain, outputs = [[3, 4], [5, 6, 7]], [[8, 9, 10], [11, 12]], [[8, 9, 10], [11, 30]]
    (mismatch,) = find_mismatches(target, prompts, plain, outputs)
    best = target(torch.tensor([[5, 6, 7, 11]])).logits[0, -1].topk(2).values
    assert (mismatch.prompt, mismatch.position, mismatch.plain_token, mismatch.token) == (1, 1, 12, 30)
    assert mismatch.top2_gap == pytest.approx(float(best[0] - best[1]), abs=1e-4)
    assert not mismatch.is_near_tie


def test_an_exact_tie_is_called_one(make_model: Callable[..., PreTrainedModel]) -> None:
    target = make_model(0)
    with torch.no_grad():
        target.lm_head.weight[7] = target.lm_head.weight[20] = 5 * target.lm_head.weight[20]
    found = [find_mismatches(target, [[p, 3]], [[7]], [[20]])[0] for p in range(3, 20)]
    # Wherever the doubled row is the best one, the gap is zero.
    assert any(mismatch.top2_gap < 1e-6 and mismatch.is_near_tie for mismatch in found)


def test_an_output_that_ended_early_has_no_token(make_model: Callable[..., PreTrainedModel]) -> None:
    (mismatch,) = find_mismatches(make_model(0), [[3]], [[8, 9]], [[8]])
    assert (mismatch.position, mismatch.plain_token, mismatch.token) == (1, 9, None)


@torch.no_grad()
def test_the_gap_is_finer_than_bf16_logits(make_model: Callable[..., PreTrainedModel]) -> None:
    target = make_model(0).to(torch.bfloat16)
    head = Head(target, 40)
    gaps = [top2_gap(target, head, [i, 5])[0] for i in range(3, 30)]
    for i, gap in zip(range(3, 30), gaps, strict=True):
        hidden = target.base_model(torch.tensor([[i, 5]]))[0][0, -1].float()
        best = (target.lm_head.weight.float() @ hidden).topk(2).values
        assert gap == pytest.approx(float(best[0] - best[1]), abs=1e-4)


def test_near_ties_scale_with_the_dtypes_spacing() -> None:
    assert near_tie_gap(16.0, torch.bfloat16) == pytest.approx(0.25)
    assert near_tie_gap(16.0, torch.float32) < 1e-5
