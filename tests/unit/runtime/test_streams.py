"""Streams of requests of unknown length, prompts with a shared beginning, and rows that must not feel their neighbours."""

import itertools

import numpy as np
import pytest
import torch

from specdec_runtime import DecoderConfig, Request, SpeculativeDecoder
from specdec_runtime.attention import MIN_PLAIN_ROWS, folded_sdpa
from specdec_runtime.scheduler import Row, Scheduler

PLAIN = {"num_speculative_tokens": 0, "max_batch_size": 3, "max_length": 128}


def finished(decoder: SpeculativeDecoder, requests, **settings) -> list[list[int]]:
    outputs = {}
    for event in decoder.stream(requests, **settings):
        if event.output is not None:
            outputs[event.request_index] = event.output.token_ids
    return [outputs[i] for i in range(len(outputs))]


def test_an_open_stream_is_read_as_slots_come_free(target, prompts, hf_greedy):
    num_read = 0

    def requests():
        nonlocal num_read
        for prompt in prompts:
            num_read += 1
            yield Request(prompt, 8)

    decoder = SpeculativeDecoder(target, None, DecoderConfig(**PLAIN))
    outputs, num_done = {}, 0
    for event in decoder.stream(requests()):
        if event.output is not None:
            outputs[event.request_index] = event.output.token_ids
            num_done += 1
            assert num_read <= num_done + 3 + 1
    assert [outputs[i] for i in range(len(prompts))] == [hf_greedy(target, prompt, 8) for prompt in prompts]
    assert finished(decoder, iter([])) == []


def test_an_open_stream_needs_a_length_and_checks_each_request(target):
    with pytest.raises(ValueError, match="max_length=null"):
        finished(
            SpeculativeDecoder(target, None, DecoderConfig(num_speculative_tokens=0)), iter([Request([1], 4)])
        )
    decoder = SpeculativeDecoder(target, None, DecoderConfig(**PLAIN))
    with pytest.raises(ValueError, match="request 1: .* above max_length of 128"):
        finished(decoder, iter([Request([1], 4), Request([1] * 125, 4)]))
    assert len(finished(decoder, iter([Request([1], 4)]))) == 1, "the decoder is free again"


@pytest.mark.parametrize("width_invariant", [False, True])
def test_a_shared_prefix_changes_no_token(target, near_draft, hf_greedy, width_invariant):
    prefix = [5, 6, 7, 8, 9, 10]
    prompts = [[*prefix, 20, 21], prefix, [*prefix, 30], [5, 6, 7, 40], [*prefix, *range(11, 40)]]
    fed: list[int] = []
    hook = target.model.embed_tokens.register_forward_pre_hook(
        lambda m, inputs: fed.append(inputs[0].numel())
    )
    config = DecoderConfig(num_speculative_tokens=2, max_batch_size=5, width_invariant=width_invariant)
    try:
        decoder = SpeculativeDecoder(target, near_draft, config)
        fed.clear()
        outputs = finished(decoder, [Request(prompt, 12) for prompt in prompts], shared_prefix=prefix)
    finally:
        hook.remove()
    assert outputs == [hf_greedy(target, prompt, 12) for prompt in prompts]
    # What is left of each prompt, one by one, or padded to the longest rest but for its last token.
    assert fed[0] == len(prefix) and (fed[1:6] == [2, 6, 1, 4, 29] if width_invariant else fed[1] == 5 * 28)


def test_under_width_invariance_no_number_depends_on_the_neighbours(llama):
    """The bits of a row's log-probabilities, alone and in any company, in bf16."""
    model = llama(seed=4, num_layers=2).bfloat16()
    config = DecoderConfig(**{**PLAIN, "max_batch_size": 6}, width_invariant=True, verify_width=1)
    decoder = SpeculativeDecoder(model, None, config)
    requests = [Request([3 + i, *range(4, 5 + 5 * i)], 60, logprobs=5, ignore_eos=True) for i in range(9)]
    together = decoder.generate(requests)
    for chosen in ([0], [4, 3], [8, 7, 6, 5, 4, 3, 2, 1, 0]):
        for index, output in zip(chosen, decoder.generate([requests[i] for i in chosen]), strict=True):
            assert output.token_ids == together[index].token_ids
            assert np.array_equal(output.logprobs.top_logprobs, together[index].logprobs.top_logprobs)


@pytest.mark.parametrize("num_rows", [MIN_PLAIN_ROWS - 1, MIN_PLAIN_ROWS])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_attention_of_wide_batches_is_attention(num_rows, softcap):
    torch.manual_seed(0)
    query = torch.randn(num_rows, 6, 1, 16)
    key, value = torch.randn(2, num_rows, 20, 2, 16).transpose(2, 3)
    seen = torch.arange(20) < torch.randint(1, 20, (num_rows, 1))
    mask = torch.zeros(num_rows, 1, 1, 20).masked_fill(~seen[:, None, None], -torch.inf)
    out, _ = folded_sdpa(torch.nn.Identity(), query, key, value, mask, softcap=softcap)
    keys, values = (x.repeat_interleave(3, dim=1) for x in (key, value))
    scores = query @ keys.transpose(2, 3) / 4
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    torch.testing.assert_close(out, ((scores + mask).softmax(-1) @ values).transpose(1, 2))


@pytest.mark.parametrize("finishing", list(itertools.product([False, True], repeat=5)))
def test_rows_keep_their_cache_whoever_finishes_with_whom(finishing):
    """Each row that goes on is found in its slot, by moves of which none reads what another one wrote."""
    rows = [Row(i, Request([9], 5), 0, frozenset(), None) for i in range(5)]
    scheduler = Scheduler(rows, num_slots=5)
    scheduler.admit()
    for row, is_finished in zip(rows, finishing, strict=True):
        row.finish_reason = "stop" if is_finished else None
    slots = list(range(5))
    finished, moves = scheduler.retire()
    for source, destination in moves:
        slots[destination] = slots[source]
    assert slots[: len(scheduler.active)] == [row.index for row in scheduler.active]
    assert sorted(row.index for row in [*finished, *scheduler.active]) == list(range(5))
    assert len({slot for move in moves for slot in move}) == 2 * len(moves)


def test_rows_that_finish_together_leave_the_others_alone(target, hf_greedy):
    """Slots 0, 1 and 3 finish in one round: the row in slot 2 goes on as if it were alone."""
    lengths, prompt = [4, 4, 16, 4], [5, 6, 7]
    config = DecoderConfig(num_speculative_tokens=0, max_batch_size=4)
    requests = [Request([*prompt, i], length, ignore_eos=True) for i, length in enumerate(lengths, start=20)]
    outputs = SpeculativeDecoder(target, None, config).generate(requests)
    for request, output in zip(requests, outputs, strict=True):
        expected = hf_greedy(target, request.prompt_token_ids, request.max_new_tokens, eos_token_id=-1)
        assert output.token_ids == expected


@pytest.mark.parametrize("gamma", [0, 3])
@pytest.mark.parametrize("batch", [1, 2])
def test_a_request_without_numbers_leaves_nothing_to_the_next_ones(llama, gamma, batch):
    """vllm 22180: a prompt that overflows ends as NaN; who takes its slot, or is moved to it, gets what it gets alone."""
    model = llama(seed=0, num_layers=3)
    with torch.no_grad():
        model.model.embed_tokens.weight[13] = float("nan")
    settings = {"ignore_eos": True, "logit_bias": {13: -float("inf")}}
    broken = Request([13] * 50, 4, **settings)
    good = [Request([5, 6, 7], 30, **settings), Request([8, 9], 20, **settings)]

    def decoder() -> SpeculativeDecoder:
        config = DecoderConfig(num_speculative_tokens=gamma, max_batch_size=batch)
        return SpeculativeDecoder(model, model if gamma else None, config)

    alone = [decoder().generate([request])[0] for request in good]
    together = decoder().generate([broken, *good])[1:]
    assert [o.token_ids for o in together] == [o.token_ids for o in alone]
    assert [o.stats.num_accepted for o in together] == [o.stats.num_accepted for o in alone]


def test_a_broken_sequence_leaves_nothing_to_a_shared_prefix(llama):
    model = llama(seed=0, num_layers=3)
    with torch.no_grad():
        model.model.embed_tokens.weight[13] = float("nan")
    request = Request([5, 6, 7, 8], 12, ignore_eos=True, logit_bias={13: -float("inf")})
    config = DecoderConfig(num_speculative_tokens=0, max_batch_size=1, max_length=128)
    decoder = SpeculativeDecoder(model, None, config)
    alone = finished(decoder, [request])
    decoder.generate([Request([13] * 50, 4)])
    assert finished(decoder, [request], shared_prefix=[5, 6, 7]) == alone


@pytest.mark.parametrize("prefix", [[5] * 500, [5, 6, 97], [-1], torch.tensor([5, 6])])
def test_a_prefix_that_no_prompt_can_have_is_left_out(target, hf_greedy, prefix):
    decoder = SpeculativeDecoder(target, None, DecoderConfig(num_speculative_tokens=0))
    outputs = finished(decoder, [Request([5, 6, 7], 8)], shared_prefix=prefix)
    assert outputs == [hf_greedy(target, [5, 6, 7], 8)]
