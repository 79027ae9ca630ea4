"""At T=0 in fp32 the tokens equal Transformers' plain decoding, for any draft, gamma, batch and architecture."""

import pytest
import torch
import transformers as tr

from specdec_runtime import DecoderConfig, Request, SpeculativeDecoder
from tests.unit.runtime.architectures import ARCHITECTURES

NUM_NEW = 40


@pytest.fixture(scope="module")
def expected(target, prompts, hf_greedy):
    return [hf_greedy(target, prompt, NUM_NEW) for prompt in prompts]


def decode(target, draft, prompts, **config):
    decoder = SpeculativeDecoder(target, draft, DecoderConfig(**config))
    return decoder, decoder.generate([Request(prompt, NUM_NEW) for prompt in prompts])


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("gamma", range(1, 9))
def test_equals_transformers(target, near_draft, prompts, expected, gamma, batch):
    """transformers 30042, vllm 41758: identical in fp32 for every gamma, alone and batched with ragged prompts."""
    decoder, outputs = decode(target, near_draft, prompts, num_speculative_tokens=gamma, max_batch_size=batch)
    assert [o.token_ids for o in outputs] == expected
    assert 0 < decoder.stats.num_accepted < decoder.stats.num_proposed


def test_random_draft_is_still_exact(target, random_draft, prompts, expected):
    _, outputs = decode(target, random_draft, prompts, num_speculative_tokens=4)
    assert [o.token_ids for o in outputs] == expected


def test_without_a_draft_it_is_plain_decoding(target, prompts, expected):
    decoder, outputs = decode(target, None, prompts)
    assert [o.token_ids for o in outputs] == expected
    assert decoder.stats.block_efficiency == 1.0
    assert decoder.stats.num_proposed == 0
    assert outputs[0].stats.not_speculating == "no draft"


@pytest.mark.parametrize("options", [{"gamma": "auto"}, {"width_invariant": True}, {"draft_confidence": 0.5}])
def test_options_do_not_change_the_output(target, near_draft, prompts, expected, options):
    _, outputs = decode(
        target, near_draft, prompts, num_speculative_tokens=3, prefill_chunk_tokens=16, **options
    )
    assert [o.token_ids for o in outputs] == expected


@pytest.mark.parametrize("gamma", range(1, 9))
def test_draft_that_is_the_target_is_always_accepted(target, gamma):
    """vllm 9730: past 500 tokens, for any gamma, the bonus leaves no hole in the draft's cache."""
    decoder = SpeculativeDecoder(target, target, DecoderConfig(num_speculative_tokens=gamma))
    output = decoder.generate([Request([5, 6, 7], 520, ignore_eos=True)])[0]
    assert len(output.token_ids) == 520
    assert output.stats.num_accepted == output.stats.num_proposed > 0
    assert output.stats.draft_acceptance_rate == 1.0


def test_draft_that_is_the_target_is_always_accepted_when_sampled(target):
    """Soup 345: 1.0 with every warper on, because both sides get the same ones (rounding may cost a few)."""
    warpers = {"top_k": 20, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.3, "presence_penalty": 0.2}
    decoder = SpeculativeDecoder(target, target, DecoderConfig(num_speculative_tokens=4))
    stats = decoder.generate([Request([5, 6], 200, temperature=0.9, seed=1, ignore_eos=True, **warpers)])[
        0
    ].stats
    assert stats.draft_acceptance_rate > 0.995


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architectures(name, hf_greedy):
    """Learned and rotary positions, grouped heads, soft caps, scaled logits, sliding windows past their window."""
    torch.manual_seed(0)
    model = tr.AutoModelForCausalLM.from_config(ARCHITECTURES[name]()).eval()
    draft = tr.AutoModelForCausalLM.from_config(ARCHITECTURES[name]()).eval()
    implementation = model.config._attn_implementation
    prompts = [list(range(3, 3 + n)) for n in (4, 45, 1)]
    expected = [hf_greedy(model, prompt, 30) for prompt in prompts]
    for proposer in (draft, model):
        decoder = SpeculativeDecoder(
            model, proposer, DecoderConfig(num_speculative_tokens=3, max_batch_size=2)
        )
        outputs = decoder.generate([Request(prompt, 30) for prompt in prompts])
        assert [o.token_ids for o in outputs] == expected
    assert decoder.stats.draft_acceptance_rate == 1.0
    assert model.config._attn_implementation == implementation  # the user's model is left as it was


def test_bf16_equals_plain_decoding_at_the_same_width(llama):
    """vllm 41758, 54506: padded to gamma + 1, plain decoding gives the speculative tokens in bf16 too."""
    target = llama(seed=0, num_layers=3).bfloat16()
    draft = llama(seed=5, num_layers=1).bfloat16()
    requests = [Request([7, 8, n], 60, ignore_eos=True) for n in range(3, 9)]
    speculative = SpeculativeDecoder(target, draft, DecoderConfig(num_speculative_tokens=4, max_batch_size=1))
    plain = SpeculativeDecoder(target, None, DecoderConfig(verify_width=5, max_batch_size=1))
    assert [o.token_ids for o in speculative.generate(requests)] == [
        o.token_ids for o in plain.generate(requests)
    ]
