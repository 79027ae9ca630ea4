"""The warpers against Transformers' own processors, and what depends on the tokens seen."""

import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specdec_runtime import Request
from specdec_runtime.noise import uniforms
from specdec_runtime.sampling import BatchSampling, warp_logits

VOCAB = 3000


def logits(num_rows=3, num_positions=2, vocab=VOCAB):
    torch.manual_seed(0)
    return torch.randn(num_rows, num_positions, vocab) * 3


def peer(rows: torch.Tensor, *processors) -> torch.Tensor:
    out = []
    for position in range(rows.shape[1]):
        x = rows[:, position].float()
        for processor in processors:
            x = processor(torch.zeros(rows.shape[0], 1, dtype=torch.long), x)
        out.append(x)
    return torch.stack(out, dim=1)


@pytest.mark.parametrize(
    ("kwargs", "processors"),
    [
        ({}, []),
        ({"top_k_B": torch.tensor([7, 7, 7])}, [TopKLogitsWarper(7)]),
        ({"top_p_B": torch.tensor([0.9] * 3)}, [TopPLogitsWarper(0.9)]),
        ({"top_p_B": torch.tensor([0.99] * 3)}, [TopPLogitsWarper(0.99)]),
        ({"min_p_B": torch.tensor([0.05] * 3)}, [MinPLogitsWarper(0.05)]),
        (
            {
                "top_k_B": torch.tensor([50] * 3),
                "top_p_B": torch.tensor([0.8] * 3),
                "min_p_B": torch.tensor([0.03] * 3),
            },
            [TopKLogitsWarper(50), TopPLogitsWarper(0.8), MinPLogitsWarper(0.03)],
        ),
    ],
)
def test_warpers_equal_transformers(kwargs, processors):
    x = logits()
    ours = warp_logits(x, temperature_B=torch.tensor([0.7] * 3), **kwargs).softmax(dim=2)
    theirs = peer(x, TemperatureLogitsWarper(0.7), *processors).softmax(dim=2)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-7)
    assert ((ours == 0) == (theirs == 0)).all()


def test_flat_distribution_needs_more_than_the_likely_candidates():
    """top_p over a nearly flat distribution goes beyond the ids that are sorted first."""
    x = logits() * 0.01
    ours = warp_logits(x, temperature_B=torch.ones(3), top_p_B=torch.tensor([0.9] * 3)).softmax(dim=2)
    assert ((ours > 0).sum(dim=2) > 1024).all()
    torch.testing.assert_close(ours, peer(x, TopPLogitsWarper(0.9)).softmax(dim=2), rtol=1e-3, atol=1e-7)


def test_rows_differ_and_temperature_zero_is_one_hot():
    x = logits()
    warped = warp_logits(
        x,
        temperature_B=torch.tensor([0.0, 1.0, 1.0]),
        top_k_B=torch.tensor([0, 4, 0]),
        top_p_B=torch.tensor([0.5, 1.0, 1.0]),
    ).softmax(dim=2)
    assert (warped[0] > 0).sum(dim=1).tolist() == [1, 1]
    assert (warped[0].argmax(dim=1) == x[0].argmax(dim=1)).all()
    assert (warped[1] > 0).sum(dim=1).tolist() == [4, 4]
    torch.testing.assert_close(warped[2], x[2].softmax(dim=1))


def batch(request: Request, sequence: list[int], vocab=8) -> BatchSampling:
    return BatchSampling([request], [sequence], [[2]], vocab_size=vocab, device=torch.device("cpu"))


def test_penalties_see_the_proposals_before_a_position():
    """TRT-LLM 17701: penalties are applied, and inside a block each position counts the proposals before it."""
    request = Request([3], temperature=1.0, repetition_penalty=2.0, presence_penalty=0.5)
    x = torch.ones(1, 3, 8)
    out = batch(request, [3, 4]).adjust(
        x, num_generated_B=torch.tensor([1]), proposed_BG=torch.tensor([[5, 6]]), first_offset=0
    )
    assert out[0, 0].tolist() == [1, 1, 1, 0.5, 0.0, 1, 1, 1]  # 3: prompt (repetition); 4: output (both)
    assert out[0, 1].tolist() == [1, 1, 1, 0.5, 0.0, 0.0, 1, 1]
    assert out[0, 2].tolist() == [1, 1, 1, 0.5, 0.0, 0.0, 0.0, 1]
    step = batch(request, [3, 4]).adjust(
        x[:, 2:], num_generated_B=torch.tensor([1]), proposed_BG=torch.tensor([[5, 6]]), first_offset=2
    )
    assert step[0, 0].tolist() == out[0, 2].tolist()  # the draft's step and the target's block agree


def test_repetition_penalty_equals_transformers():
    x = logits(1, 1, 8)
    ours = batch(Request([3, 5], repetition_penalty=1.7), [3, 5, 6]).adjust(
        x, num_generated_B=torch.tensor([1]), proposed_BG=torch.zeros(1, 0, dtype=torch.long), first_offset=0
    )
    theirs = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([[3, 5, 6]]), x[:, 0])
    torch.testing.assert_close(ours[:, 0], theirs)


def test_a_shortlist_gets_its_own_columns():
    ids = torch.tensor([1, 4, 6])
    request = Request([3], logit_bias={4: 2.0, 5: 9.0}, min_new_tokens=3, repetition_penalty=2.0)
    out = batch(request, [3, 6]).adjust(
        torch.ones(1, 1, 3),
        num_generated_B=torch.tensor([1]),
        proposed_BG=torch.zeros(1, 0, dtype=torch.long),
        first_offset=0,
        vocab_ids_N=ids,
    )
    assert out[0, 0].tolist() == [1.0, 3.0, 0.5]


def test_noise_is_uniform_and_depends_on_its_row_only():
    """vllm 10863: a seeded row's noise does not depend on its neighbours."""
    import numpy as np

    seeds = np.arange(5000, dtype=np.uint64)
    drawn = uniforms(seeds, np.zeros(5000, dtype=np.int64), 4)
    assert drawn.min() >= 0 and drawn.max() < 1
    assert abs(drawn.mean() - 0.5) < 0.005
    flat = drawn.reshape(12, 5000)
    correlation = np.corrcoef(flat) - np.eye(12)
    assert np.abs(correlation).max() < 0.06
    alone = uniforms(seeds[7:8], np.array([2]), 2)
    np.testing.assert_array_equal(alone[:, 0], drawn[:, 7, 2:])
