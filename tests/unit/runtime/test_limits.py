"""Guards: contexts, memory, budgets, models that cannot be used, and the warning about a poor draft."""

import logging

import pytest
import torch
import transformers as tr

from specdec_runtime import DecoderConfig, Request, SpeculativeDecoder
from specdec_runtime.forward import padded_capacity


def test_beyond_the_drafts_context_a_row_is_decoded_plainly(target, llama, hf_greedy):
    """SpecForge 271, vllm 58080, 57941: row by row, without a crash and without a change of output."""
    draft = llama(seed=5, num_layers=1, max_position_embeddings=24)
    prompts = [list(range(3, 40)), [5, 6, 7]]
    decoder = SpeculativeDecoder(target, draft, DecoderConfig(num_speculative_tokens=3, max_batch_size=2))
    outputs = decoder.generate([Request(p, 60, ignore_eos=True) for p in prompts])
    assert [o.token_ids for o in outputs] == [hf_greedy(target, p, 60, eos_token_id=None) for p in prompts]
    assert outputs[0].stats.num_proposed == 0
    assert outputs[1].stats.num_proposed > 0
    assert "draft's context of 24" in outputs[0].stats.not_speculating
    assert "draft's context of 24" in outputs[1].stats.not_speculating  # from its 24th token on


def test_learned_positions_end_with_the_context(hf_greedy):
    """The padded block near the end of a full context uses no position that does not exist."""
    torch.manual_seed(0)
    config = tr.GPT2Config(vocab_size=50, n_embd=16, n_layer=1, n_head=2, n_positions=32, eos_token_id=2)
    model = tr.GPT2LMHeadModel(config).eval()
    decoder = SpeculativeDecoder(model, model, DecoderConfig(num_speculative_tokens=5))
    output = decoder.generate([Request([3, 4], 30, ignore_eos=True)])[0]
    assert output.token_ids == hf_greedy(model, [3, 4], 30, eos_token_id=None)


def test_long_prompts_do_not_speculate(target):
    decoder = SpeculativeDecoder(target, target, DecoderConfig(max_prompt_tokens_to_speculate=4))
    long, short = decoder.generate(
        [Request([5] * 5, 10, ignore_eos=True), Request([5] * 4, 10, ignore_eos=True)]
    )
    assert long.stats.num_proposed == 0
    assert "max_prompt_tokens_to_speculate=4" in long.stats.not_speculating
    assert short.stats.num_proposed > 0


def test_proposals_per_batch_are_bounded(target):
    decoder = SpeculativeDecoder(target, target, DecoderConfig(num_speculative_tokens=6, max_draft_tokens=8))
    outputs = decoder.generate([Request([5, n], 24, ignore_eos=True) for n in range(4)])
    assert all(len(o.stats.proposed_per_position) == 2 for o in outputs)  # 8 proposals for 4 rows


def test_kv_memory_is_computed_before_it_is_taken(target):
    """The refusal's figures are those of the caches: 3 layers x (K and V) x 2 heads x 8 x 4 bytes per position."""
    decoder = SpeculativeDecoder(target, None, DecoderConfig(max_batch_size=4, kv_memory_limit_gib=1e-6))
    with pytest.raises(
        ValueError, match=r"GiB for the target \(4 slots of .* kv_memory_limit_gib allows 0\.000 GiB"
    ):
        decoder.generate([Request([5], 400)] * 4)
    assert decoder.target.cache is None
    assert decoder.target.kv_bytes(4, 400) == 3 * 2 * 2 * 8 * 4 * 4 * padded_capacity(400)


def test_recurrent_state_and_unknown_windows_are_refused():
    mamba = tr.MambaForCausalLM(
        tr.MambaConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, state_size=4)
    )
    with pytest.raises(ValueError, match="MambaForCausalLM"):
        SpeculativeDecoder(mamba)
    shape = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    windowed = tr.Starcoder2ForCausalLM(tr.Starcoder2Config(**shape, **heads, sliding_window=8))
    with pytest.raises(ValueError, match="sliding window of 8"):
        SpeculativeDecoder(windowed)


def test_a_poor_draft_is_warned_about(target, random_draft, prompts, caplog):
    """Soup 303, 843: say that it will not pay."""
    decoder = SpeculativeDecoder(target, random_draft, DecoderConfig(num_speculative_tokens=4))
    with caplog.at_level(logging.WARNING, logger="specdec_runtime"):
        decoder.generate([Request(p, 40, ignore_eos=True) for p in prompts])
    assert "min_conditional_acceptance" in caplog.text


@pytest.mark.parametrize(("draft_vocab", "shortlist"), [(97, [1, 5, 9, 40]), (120, None), (64, None)])
def test_vocabularies_of_other_widths_and_shortlists(
    target, llama, prompts, hf_greedy, draft_vocab, shortlist
):
    """vllm 7252: a padded or smaller draft vocabulary, or a trimmed head, changes no output."""
    draft = llama(seed=5, num_layers=1, vocab_size=draft_vocab)
    weights_before = draft.lm_head.weight
    ids = None if shortlist is None else torch.tensor(shortlist)
    decoder = SpeculativeDecoder(target, draft, DecoderConfig(num_speculative_tokens=3), draft_vocab_ids=ids)
    outputs = decoder.generate([Request(p, 20) for p in prompts[:4]])
    assert [o.token_ids for o in outputs] == [hf_greedy(target, p, 20) for p in prompts[:4]]
    assert draft.lm_head.weight is weights_before


@pytest.mark.parametrize("shortlist", [[1, 5, 9, 40], torch.tensor([1, 5, 9, 40], dtype=torch.int32)])
def test_a_shortlist_may_be_a_list_or_of_any_integers(target, near_draft, hf_greedy, shortlist):
    decoder = SpeculativeDecoder(target, near_draft, draft_vocab_ids=shortlist)
    sampled, greedy = decoder.generate([Request([5, 6], 20, temperature=1.0, seed=1), Request([5, 6], 20)])
    assert greedy.token_ids == hf_greedy(target, [5, 6], 20)
    assert sampled.token_ids


@pytest.mark.parametrize("ids", [[], [3, 3], [5, 4], [96, 97], [-1, 4]])
def test_wrong_shortlists_are_refused(target, random_draft, ids):
    with pytest.raises(ValueError, match="draft_vocab_ids"):
        SpeculativeDecoder(target, random_draft, draft_vocab_ids=torch.tensor(ids, dtype=torch.long))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("sampler", "beam"),
        ("gamma", "best"),
        ("acceptance", "maybe"),
        ("num_speculative_tokens", -1),
        ("num_speculative_tokens", 2.5),
        ("max_batch_size", "8"),
        ("max_batch_size", 0),
        ("verify_width", 3),
        ("eta", 0.0),
        ("draft_confidence", 1.5),
        ("kv_memory_limit_gib", 0.0),
        ("max_length", 1),
    ],
)
def test_wrong_settings_are_refused_by_name(field, value):
    with pytest.raises(ValueError, match=field):
        DecoderConfig(**{field: value})


@pytest.mark.parametrize("width_invariant", [False, True])
def test_more_proposals_than_there_are_scratch_positions(target, llama, hf_greedy, width_invariant):
    """A row near the end of the draft's context takes part in the steps of one that proposes 100: its keys stay in its slot."""
    draft = llama(seed=0, num_layers=3, max_position_embeddings=128)  # else the target
    prompts = [[5, 6, 7], list(range(3, 97)) + list(range(3, 29))]
    config = DecoderConfig(
        num_speculative_tokens=100, max_draft_tokens=200, max_batch_size=3, width_invariant=width_invariant
    )
    outputs = SpeculativeDecoder(target, draft, config).generate([Request(p, 110, ignore_eos=True) for p in prompts])
    assert [o.token_ids for o in outputs] == [hf_greedy(target, p, 110, eos_token_id=None) for p in prompts]
    assert outputs[0].stats.num_rounds == 2


def test_a_draft_on_another_device_is_refused(target, llama):
    with pytest.raises(ValueError, match="is on meta, the target on cpu"):
        SpeculativeDecoder(target, llama(seed=5, num_layers=1).to("meta"))
