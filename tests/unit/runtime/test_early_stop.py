"""`draft_confidence`: proposals end where the draft's own probabilities say so, and rows of a batch keep together."""

import pytest
import torch

from specdec_runtime import DecoderConfig, Request, SpeculativeDecoder
from specdec_runtime.observe import RoundRecord

GAMMA, NUM_NEW = 5, 60


def rounds_of(target, draft, prompts, **config) -> list[RoundRecord]:
    records: list[RoundRecord] = []
    settings = DecoderConfig(num_speculative_tokens=GAMMA, max_batch_size=len(prompts), **config)
    decoder = SpeculativeDecoder(target, draft, settings, on_round=records.append)
    decoder.generate([Request(prompt, NUM_NEW, ignore_eos=True) for prompt in prompts])
    return records


@torch.no_grad()
def chances(draft, context: list[int], proposed: list[int]) -> list[float]:
    """Product of the draft's largest probabilities behind each proposal, by one ordinary forward."""
    logits = draft(torch.tensor([[*context, *proposed]])).logits[0, len(context) - 1 : -1]
    return logits.softmax(dim=1).amax(dim=1).cumprod(dim=0).tolist()


@pytest.mark.parametrize("confidence", [0.2, 0.5, 0.9])
def test_a_row_stops_behind_the_first_proposal_with_too_small_a_chance(
    target, near_draft, prompts, confidence
):
    """As in Transformers' assisted generation the unsure token itself is still proposed: it is paid for already."""
    prompt = prompts[3]
    records = rounds_of(target, near_draft, [prompt], draft_confidence=confidence)
    first_id = (
        SpeculativeDecoder(target, None, DecoderConfig())
        .generate([Request(prompt, 1, ignore_eos=True)])[0]
        .token_ids
    )
    context, num_early = prompt + first_id, 0
    for record in records:
        most = min(GAMMA, NUM_NEW - record.start - 1)
        num = len(record.proposed_ids)
        if num:
            before = chances(near_draft, context, record.proposed_ids)
            assert all(chance >= confidence for chance in before[:-1])
            assert num == most or before[-1] < confidence
            num_early += num < most
        context = context + record.committed_ids
    assert num_early > 0


def test_no_row_runs_far_ahead_of_the_one_that_stopped_first(target, near_draft, prompts):
    """`max_gamma_spread`: proposals of the rows of one round lie at most so far apart."""

    def largest_spread(**config) -> int:
        records = rounds_of(target, near_draft, prompts[:4], draft_confidence=0.3, **config)
        spreads, nums = [], []
        for record in records:
            if record.request_index == 0:
                spreads.append(max(nums, default=0) - min(nums, default=0))
                nums = []
            if record.start < NUM_NEW - GAMMA - 1:  # near its end a row proposes less
                nums.append(len(record.proposed_ids))
        return max(spreads)

    assert largest_spread(max_gamma_spread=0) == 0
    assert largest_spread(max_gamma_spread=9) > 0
