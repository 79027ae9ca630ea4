"""Acceptance by chance, for timing random weights: the rate is right and outputs are marked lossy."""

import pytest

from specdec_runtime import DecoderConfig, Request, SpeculativeDecoder


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_each_judged_proposal_is_accepted_at_the_rate(target, random_draft, prompts, temperature):
    config = DecoderConfig(num_speculative_tokens=3, acceptance="synthetic", synthetic_acceptance=0.7)
    decoder = SpeculativeDecoder(target, random_draft, config)
    requests = [
        Request(prompt, 150, temperature=temperature, seed=i, ignore_eos=True)
        for i, prompt in enumerate(prompts)
    ]
    outputs = decoder.generate(requests)
    assert not any(output.lossless for output in outputs)
    assert all(len(output.token_ids) == 150 for output in outputs)
    num_judged = sum(decoder.stats.judged_per_position)
    # Five standard deviations of a binomial share.
    assert decoder.stats.num_accepted / num_judged == pytest.approx(0.7, abs=5 * (0.21 / num_judged) ** 0.5)
    assert decoder.stats.conditional_acceptance == pytest.approx([0.7] * 3, abs=0.15)


@pytest.mark.parametrize(("rate", "tau"), [(0.0, 1.0), (1.0, 4.0)])
def test_the_ends_accept_nothing_and_everything(target, random_draft, prompts, rate, tau):
    config = DecoderConfig(num_speculative_tokens=3, acceptance="synthetic", synthetic_acceptance=rate)
    decoder = SpeculativeDecoder(target, random_draft, config)
    (output,) = decoder.generate([Request(prompts[0], 41, ignore_eos=True)])
    assert (output.stats.num_committed - 1) / output.stats.num_rounds == tau


def test_the_rate_is_checked():
    with pytest.raises(ValueError, match=r"synthetic_acceptance=1\.5"):
        DecoderConfig(synthetic_acceptance=1.5)
