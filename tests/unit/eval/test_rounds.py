"""Rounds worked out from text against a simulation and against the engine; alpha from both sides."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from eval.acceptance_summary import Resampling, decoded_row
from eval.decoded_acceptance import DecodedAcceptance, decoded_acceptance
from eval.rounds import ExpectedRounds, expected_rounds, rounds_of
from eval.teacher_forced import teacher_forced_acceptance
from eval.teacher_forcing import Draft
from eval.theory import expected_tokens_iid
from specdec_runtime import DecoderConfig, Request, SpeculativeDecoder

MakeModel = Callable[..., PreTrainedModel]
NUM_NEW_TOKENS = 24


def simulated(
    stands: list[float], gamma: int, *, was_cut: bool, seed: int
) -> tuple[int, list[int], list[int]]:
    """One decoding, coin by coin: rounds, and judged and accepted proposals by place."""
    rng, start, num_rounds = np.random.default_rng(seed), 1, 0
    judged, accepted, length = [0] * gamma, [0] * gamma, len(stands)
    while start < length:
        num_rounds += 1
        wanted = min(gamma, length - start - 1) if was_cut else gamma
        place = 0
        while place < wanted and start + place < length:
            judged[place] += 1
            if rng.random() >= stands[start + place]:
                break
            accepted[place] += 1
            place += 1
        start += place + 1
    return num_rounds, judged, accepted


@pytest.mark.parametrize("was_cut", [True, False])
@pytest.mark.parametrize("gamma", [1, 3, 20])
def test_expected_counts_are_those_of_a_simulation(gamma: int, was_cut: bool) -> None:
    stands = np.random.default_rng(5).random(9).astype(np.float32)
    runs = [simulated(list(stands), gamma, was_cut=was_cut, seed=seed) for seed in range(4000)]
    expected = rounds_of([stands], gamma, was_cut=[was_cut])
    assert expected.num_rounds[0] == pytest.approx(np.mean([run[0] for run in runs]), abs=0.06)
    np.testing.assert_allclose(expected.judged[0], np.mean([run[1] for run in runs], axis=0), atol=0.06)
    np.testing.assert_allclose(expected.accepted[0], np.mean([run[2] for run in runs], axis=0), atol=0.06)


def test_each_response_is_followed_for_itself() -> None:
    rng = np.random.default_rng(0)
    responses = [rng.random(n).astype(np.float32) for n in (1, 2, 7, 12)]
    cut = [True, False, False, True]
    together = rounds_of(responses, 3, was_cut=cut)
    for i, response in enumerate(responses):
        alone = rounds_of([response], 3, was_cut=[cut[i]])
        assert together.num_rounds[i] == pytest.approx(alone.num_rounds[0])
        np.testing.assert_allclose(together.accepted[i], alone.accepted[0])


def test_limits_are_the_formulas() -> None:
    always, never = [np.ones(31, np.float32)], [np.zeros(31, np.float32)]
    assert rounds_of(always, 4, was_cut=[True]).num_rounds[0] == 6, "30 tokens in blocks of 5"
    assert rounds_of(never, 4, was_cut=[True]).block_efficiency().value == 1.0
    constant = [np.full(4000, 0.6, np.float32)]
    tau = rounds_of(constant, 3, was_cut=[True]).block_efficiency().value
    assert tau == pytest.approx(expected_tokens_iid(0.6, 3), rel=1e-3)
    assert rounds_of(constant, 3, was_cut=[True]).conditional == pytest.approx([0.6] * 3)
    with pytest.raises(ValueError, match="gamma=0"):
        rounds_of(constant, 0, was_cut=[True])


def own_responses(
    target: PreTrainedModel, prompts: list[list[int]], temperature: float
) -> list[dict[str, object]]:
    """Rows whose responses the target itself sampled."""
    decoder = SpeculativeDecoder(target, config=DecoderConfig(max_batch_size=32))
    outputs = decoder.generate(
        [
            Request(p, max_new_tokens=NUM_NEW_TOKENS, temperature=temperature, seed=1000 + i)
            for i, p in enumerate(prompts)
        ]
    )
    return [
        {
            "prompt_id": str(i), "source": "s", "prompt_token_ids": prompt, "temperature": temperature,
            "response_token_ids": output.token_ids, "finish_reason": output.finish_reason,
        }
        for i, (prompt, output) in enumerate(zip(prompts, outputs, strict=True))
    ]  # fmt: skip


def both_sides(
    make_model: MakeModel, *, temperature: float, sampler: str, gamma: int, num_prompts: int = 96
) -> tuple[float, ExpectedRounds, DecodedAcceptance]:
    """(marginal alpha, expected rounds on the target's own text, what the engine's decoding shows)."""
    target = make_model(0)
    # A draft that agrees in part: the target with noise in its weights.
    draft = make_model(0)
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter += 0.08 * torch.randn_like(parameter)
    generator = torch.Generator().manual_seed(3)
    prompts = torch.randint(3, 40, (num_prompts, 6), generator=generator).tolist()
    (table,) = teacher_forced_acceptance(
        target, {"d": Draft(draft)}, own_responses(target, prompts, temperature),
        temperatures=[temperature], samplers=[sampler],
    )  # fmt: skip
    (decoded,) = decoded_acceptance(
        target, {"d": Draft(draft)}, prompts, temperature=temperature, gamma=gamma, sampler=sampler,
        max_new_tokens=NUM_NEW_TOKENS, batch_size=32,
    )  # fmt: skip
    return table.rate().value, expected_rounds(table, gamma), decoded


@pytest.mark.parametrize("sampler", ["probabilistic", "greedy"])
@pytest.mark.parametrize("gamma", [1, 4, NUM_NEW_TOKENS])
def test_alpha_from_text_and_from_decoding_agree_at_temperature_1(
    make_model: MakeModel, sampler: str, gamma: int
) -> None:
    """EAGLE 146, 191; sglang 11572: bonus tokens counted, conditional and marginal figures mixed up."""
    alpha, expected, decoded = both_sides(make_model, temperature=1.0, sampler=sampler, gamma=gamma)
    assert 0.05 < alpha < 0.95
    from_text, from_decoding = expected.judged_acceptance(), decoded.judged_acceptance()
    assert from_text.low <= from_decoding.high and from_decoding.low <= from_text.high
    assert from_text.value == pytest.approx(from_decoding.value, abs=0.05)
    tau_text, tau_decoding = expected.block_efficiency(), decoded.block_efficiency()
    assert tau_text.low <= tau_decoding.high and tau_decoding.low <= tau_text.high
    if gamma == NUM_NEW_TOKENS:
        # No bonus ever: every position but the first and the last is judged once, so it is the marginal rate.
        assert from_decoding.low <= alpha <= from_decoding.high
        stats = decoded.stats
        assert sum(stats.judged_per_position) >= stats.num_committed - 2 * len(decoded.outputs)
    first = decoded.conditional()[0]
    assert first.low <= expected.conditional[0] <= first.high


@pytest.mark.parametrize("gamma", [1, 2, 5])
def test_at_temperature_0_the_rounds_are_the_engines_exactly(make_model: MakeModel, gamma: int) -> None:
    """Greedy text and fp32: each proposal's fate is known from the text, so nothing is left to chance."""
    _, expected, decoded = both_sides(
        make_model, temperature=0.0, sampler="greedy", gamma=gamma, num_prompts=24
    )
    stats = [output.stats for output in decoded.outputs]
    np.testing.assert_allclose(expected.num_rounds, [s.num_rounds for s in stats], atol=1e-4)
    total = decoded.stats
    np.testing.assert_allclose(expected.accepted.sum(axis=0), total.accepted_per_position, atol=1e-3)
    np.testing.assert_allclose(expected.judged.sum(axis=0), total.judged_per_position, atol=1e-3)
    assert expected.conditional == pytest.approx(total.conditional_acceptance, abs=1e-4)
    assert expected.block_efficiency().value == pytest.approx(total.block_efficiency, abs=1e-4)


def test_the_target_as_its_own_draft_stands_always(make_model: MakeModel) -> None:
    """vllm 9730: draft == target accepts everything, for any gamma and length."""
    target = make_model(0)
    for temperature in (0.0, 1.0):
        (decoded,) = decoded_acceptance(
            target,
            {"self": Draft(target)},
            [[3, 4, 5], [6, 7]],
            temperature=temperature,
            gamma=3,
            max_new_tokens=9,
        )
        assert decoded.judged_acceptance().value == 1.0
        assert [interval.value for interval in decoded.conditional()] == [1.0] * 3
    with pytest.raises(ValueError, match="no prompts"):
        decoded_acceptance(target, {"self": Draft(target)}, [], temperature=0.0, gamma=1)


def test_answers_without_a_judged_proposal_have_no_acceptance(make_model: MakeModel) -> None:
    """Where every prompt is answered by EOS at once, as with a limit of one token, there is nothing to divide by."""
    draft = Draft(make_model(1))
    row = {"prompt_id": "a", "source": "s", "prompt_token_ids": [5, 6], "response_token_ids": [7], "temperature": 0.0}
    (table,) = teacher_forced_acceptance(make_model(0), {"d": draft}, [row], temperatures=[0.0], samplers=["probabilistic"])
    (decoded,) = decoded_acceptance(make_model(0), {"d": draft}, [[5, 6]], temperature=0.0, gamma=2, max_new_tokens=1)
    shown = decoded_row(decoded, [table], Resampling(num_bootstrap=10))
    assert (shown["judged_acceptance"], shown["agrees"], shown["num_judged"]) == (None, None, 0)
    assert shown["from_text"]["judged_acceptance"] is None
    assert shown["block_efficiency"]["value"] == shown["from_text"]["block_efficiency"]["value"] == 1.0
