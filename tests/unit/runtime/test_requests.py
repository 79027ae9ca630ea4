"""What requests promise: caps, stops, seeds, logprobs, refusals."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from specdec_runtime import DecoderConfig, Request, SpeculativeDecoder


def text_of(ids: list[int]) -> str:
    """A toy detokenizer: one letter per id."""
    return "".join(chr(ord("a") + i % 26) for i in ids)


def decoder(target, draft, **config) -> SpeculativeDecoder:
    return SpeculativeDecoder(target, draft, DecoderConfig(**config), detokenize=text_of)


def test_max_new_tokens_is_a_hard_cap(target):
    """transformers 47195: never more than asked for, also when everything is accepted."""
    requests = [Request([5, 6], n, ignore_eos=True) for n in (1, 2, 3, 5, 6, 7)]
    outputs = decoder(target, target, num_speculative_tokens=4).generate(requests)
    assert [len(o.token_ids) for o in outputs] == [1, 2, 3, 5, 6, 7]
    assert all(o.finish_reason == "length" for o in outputs)
    assert all(len(o.token_times_s) == len(o.token_ids) for o in outputs)
    assert all(o.stats.num_committed == len(o.token_ids) for o in outputs)


def test_cut_at_the_first_eos_inside_an_accepted_block(target, hf_greedy):
    """transformers 47912, vllm 56101: nothing after EOS is put out or counted."""
    plain = hf_greedy(target, [5, 6, 7], 30, eos_token_id=None)
    eos = plain[5]
    end = plain.index(eos) + 1
    output = decoder(target, target, num_speculative_tokens=8).generate(
        [Request([5, 6, 7], 30, stop_token_ids=[eos])]
    )[0]
    assert output.token_ids == plain[:end]
    assert output.finish_reason == "stop"
    assert output.stats.num_accepted == output.stats.num_proposed == end - 1  # all but the prefill's token
    assert sum(output.stats.accepted_per_position) == end - 1


def test_min_new_tokens_holds_eos_back(target, hf_greedy):
    plain = hf_greedy(target, [5, 6, 7], 30, eos_token_id=None)
    eos = plain[1]
    request = Request([5, 6, 7], 30, min_new_tokens=10, stop_token_ids=[eos])
    output = decoder(target, target, num_speculative_tokens=4).generate([request])[0]
    assert eos not in output.token_ids[:10]
    assert len(output.token_ids) >= 10


@pytest.mark.parametrize("gamma", [0, 1, 4])
def test_min_new_tokens_passes_over_early_stop_strings(target, gamma):
    """vllm 21987: a stop string ended the output before `min_tokens`."""
    whole = decoder(target, None).generate([Request([5, 6, 7], 40, ignore_eos=True)])[0].text
    stop = next(letter for letter in whole if whole.find(letter, 10) >= 0)
    request = Request([5, 6, 7], 40, min_new_tokens=10, stop=[stop], ignore_eos=True)
    output = decoder(target, target, num_speculative_tokens=gamma).generate([request])[0]
    assert whole.index(stop) < 10, "the case would say nothing"
    assert output.text == whole[: whole.find(stop, 10)]
    assert len(output.token_ids) == len(output.text)


def test_ignore_eos_goes_on(llama, prompts):
    target = llama(seed=0, num_layers=3)
    target.generation_config.eos_token_id = list(range(40))
    short = decoder(target, None).generate([Request(prompts[0], 20)])[0]
    whole = decoder(target, None).generate([Request(prompts[0], 20, ignore_eos=True)])[0]
    assert short.finish_reason == "stop"
    assert len(short.token_ids) < len(whole.token_ids) == 20
    assert whole.token_ids[: len(short.token_ids)] == short.token_ids


@pytest.mark.parametrize("gamma", [1, 4, 8])
def test_stop_string_trims_ids_text_and_logprobs_together(target, gamma):
    """vllm 47616: a stop string found in the middle of a committed block."""
    whole = decoder(target, None).generate([Request([5, 6, 7], 40, ignore_eos=True)])[0]
    stop = whole.text[11:13]
    at = whole.text.find(stop)
    request = Request([5, 6, 7], 40, stop=[stop], ignore_eos=True, logprobs=2)
    output = decoder(target, target, num_speculative_tokens=gamma).generate([request])[0]
    assert output.finish_reason == "stop"
    assert output.text == whole.text[:at]
    assert output.token_ids == whole.token_ids[:at]
    assert (
        len(output.logprobs.token_logprobs) == len(output.logprobs.top_ids) == len(output.token_times_s) == at
    )
    assert output.stats.num_committed == at


def test_stream_gives_the_tokens_of_generate_and_takes_none_back(target, near_draft, prompts):
    whole = decoder(target, None).generate([Request(prompts[0], 30, ignore_eos=True)])[0]
    stop = whole.text[9:12]
    requests = [Request(p, 30, ignore_eos=True, stop=[stop]) for p in prompts[:4]]
    expected = decoder(target, near_draft, max_batch_size=2).generate(requests)
    streamed, reasons = [[] for _ in requests], [None] * len(requests)
    for event in decoder(target, near_draft, max_batch_size=2).stream(requests):
        streamed[event.request_index] += event.token_ids
        reasons[event.request_index] = event.finish_reason
    assert streamed == [o.token_ids for o in expected]
    assert reasons == [o.finish_reason for o in expected]


def test_one_stream_at_a_time(target):
    """Two streams would share the slots; an abandoned stream frees them."""
    one = decoder(target, None)
    stream = one.stream([Request([5, 6], 9, ignore_eos=True)])
    next(stream)
    with pytest.raises(ValueError, match="in the middle of a stream"):
        one.generate([Request([5], 3)])
    stream.close()
    assert len(one.generate([Request([5], 3, ignore_eos=True)])[0].token_ids) == 3


def test_logprobs_are_the_raw_targets(target, near_draft):
    request = Request([5, 6, 7], 12, temperature=0.7, top_k=5, seed=3, logprobs=4, ignore_eos=True)
    output = decoder(target, near_draft, num_speculative_tokens=3).generate([request])[0]
    ids = torch.tensor([[5, 6, 7, *output.token_ids]])
    with torch.inference_mode():
        raw = target(ids).logits[0, 2:-1].log_softmax(dim=1)
    top = raw.topk(4, dim=1)
    assert output.logprobs.top_ids == top.indices.tolist()
    torch.testing.assert_close(torch.tensor(output.logprobs.top_logprobs), top.values, rtol=1e-3, atol=1e-4)
    chosen = raw.gather(1, torch.tensor(output.token_ids)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(output.logprobs.token_logprobs), chosen, rtol=1e-3, atol=1e-4)


def test_a_seeded_row_gives_the_same_alone_batched_and_in_any_order(target, near_draft, prompts):
    """vllm 10863: seeded, unseeded and greedy rows side by side do not touch each other (fp32)."""
    seeded = [Request(p, 25, temperature=0.9, top_p=0.95, seed=10 + i) for i, p in enumerate(prompts)]
    alone = [decoder(target, near_draft, max_batch_size=1).generate([r])[0].token_ids for r in seeded]
    others = [
        Request([9, 9], 17, temperature=1.2),
        Request([4, 5, 6], 9),
        Request([8], 30, temperature=1.0, top_k=3),
    ]
    mixed = [*others, *reversed(seeded)]
    outputs = decoder(target, near_draft, max_batch_size=4).generate(mixed)
    assert [o.token_ids for o in reversed(outputs[3:])] == alone


def test_opting_out_is_row_local(target, near_draft, prompts):
    """vllm-gaudi 593: a row that does not speculate next to rows that do."""
    requests = [Request(p, 20, speculate=i % 2 == 0, ignore_eos=True) for i, p in enumerate(prompts)]
    plain = decoder(target, None).generate(requests)
    outputs = decoder(target, near_draft, max_batch_size=5).generate(requests)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]
    assert all((o.stats.num_proposed > 0) == r.speculate for o, r in zip(outputs, requests, strict=True))
    assert outputs[1].stats.not_speculating == "speculate=False"


@pytest.mark.parametrize("acceptance", ["typical", "lenient"])
def test_lossy_rules_accept_more_and_say_so(target, near_draft, prompts, acceptance):
    requests = [Request(p, 30, temperature=1.0, seed=i, ignore_eos=True) for i, p in enumerate(prompts)]
    exact, lossy = (
        decoder(target, near_draft),
        decoder(target, near_draft, acceptance=acceptance, eta=0.1, lenience=0.3),
    )
    assert all(o.lossless for o in exact.generate(requests))
    assert not any(o.lossless for o in lossy.generate(requests))
    assert lossy.stats.draft_acceptance_rate > exact.stats.draft_acceptance_rate


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_new_tokens", 0),
        ("max_new_tokens", 4.0),
        ("seed", 1.5),
        ("temperature", -0.1),
        ("top_k", 0),
        ("top_p", 0.0),
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
        ("min_new_tokens", 99),
        ("logprobs", -1),
        ("prompt_token_ids", []),
        ("prompt_token_ids", torch.tensor([[1, 2]])),
        ("prompt_token_ids", "text"),
        ("prompt_token_ids", [1.5]),
        ("stop_token_ids", [None]),
        ("stop", [""]),
        ("temperature", 1e-40),
        ("repetition_penalty", float("inf")),
        ("presence_penalty", 1e39),
        ("logit_bias", {3: float("nan")}),
        ("logit_bias", {3: float("inf")}),
        ("logit_bias", {"AI": -100}),
        ("logit_bias", {3: None}),
        ("logit_bias", {3.5: 1.0}),
        ("logit_bias", [3, 4]),
        ("max_new_tokens", None),
        ("min_new_tokens", None),
        ("temperature", None),
        ("temperature", "hot"),
        ("top_p", [0.9]),
        ("stop", [7]),
        ("stop", 7),
    ],
)
def test_wrong_values_are_refused_by_name(field, value):
    """Some of them ended whole engines, or gave NaN for p, in vllm 5963, 16529 and 22180, and TRT-LLM 15715."""
    with pytest.raises(ValueError, match=field):
        Request(**{"prompt_token_ids": [1], "max_new_tokens": 4, field: value})


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request([5], 2000), "target's context of 1024"),
        (Request([97], 2), "prompt_token_ids has id 97"),
        (Request([5], 2, stop_token_ids=[200]), "stop_token_ids has id 200"),
        (Request([5], 2, logit_bias={-1: 1.0}), "logit_bias has id -1"),
        (Request([5], 2, stop=["x"]), "detokenize"),
    ],
)
def test_requests_that_do_not_fit_are_refused(target, request_, message):
    with pytest.raises(ValueError, match=message):
        SpeculativeDecoder(target, None).generate([request_])


def test_ids_come_as_tensors_and_arrays_too_and_biases_from_json():
    plain = Request([5, 6, 7], 9, stop_token_ids=[2], logit_bias={9: 4.0})
    other = Request(torch.tensor([5, 6, 7]), 9, stop_token_ids=np.int64(2), stop=None, logit_bias={"9": 4})
    assert other == plain
    with pytest.raises(ValueError, match="row by row"):
        Request(torch.tensor([[5, 6, 7]]))


def test_numbers_of_arrays_and_above_the_vocabulary_are_numbers(target, near_draft):
    """NumPy's own integers have a width, at which a seed and its mask overflowed in the middle of a call."""
    settings = {"temperature": 0.9, "top_p": 0.95, "seed": 7, "top_k": 96, "logprobs": 2}
    arrays = {
        "temperature": np.float64(0.9), "top_p": torch.tensor(0.95, dtype=torch.float64), "seed": np.int64(7), "top_k": 10**30,
        "logprobs": np.int32(2),
    }  # fmt: skip
    one = decoder(target, near_draft)
    expected, output = one.generate([Request([5, 6], 12, **settings), Request(np.array([5, 6]), np.int64(12), **arrays)])
    assert output.token_ids == expected.token_ids
    assert output.logprobs.top_ids == expected.logprobs.top_ids


@pytest.mark.parametrize("settings", [{"temperature": 1e-20}, {"temperature": 1.0, "top_p": 1e-50}])
def test_the_ends_of_the_scales_are_greedy(target, near_draft, settings):
    """vllm 1623, 2937: a tiny temperature or top_p left no probability that is a number."""
    one = decoder(target, near_draft)
    greedy, tiny = one.generate([Request([5, 6, 7], 20), Request([5, 6, 7], 20, seed=1, **settings)])
    assert tiny.token_ids == greedy.token_ids


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_bias_of_minus_infinity_bans_an_id(target, near_draft, temperature):
    request = Request([5, 6, 7], 20, temperature=temperature, seed=1, ignore_eos=True)
    free = decoder(target, near_draft).generate([request])[0].token_ids
    banned = replace(request, logit_bias={free[3]: -float("inf")})
    assert free[3] not in decoder(target, near_draft).generate([banned])[0].token_ids


def test_end_ids_that_the_model_does_not_have_end_nothing(llama, target):
    """Configs name ids of a larger tokenizer, or -1 for none; to hold them back was an index error."""
    other = llama(seed=0, num_layers=3)
    other.generation_config.eos_token_id = [2, 5000, -1]
    request = Request([5, 6, 7], 9, min_new_tokens=4)
    assert (
        decoder(other, None).generate([request])[0].token_ids == decoder(target, None).generate([request])[0].token_ids
    )


def test_a_target_whose_logits_are_no_numbers_is_told_about(llama, target, caplog):
    """vllm 22180: NaN became text. Here the text is there, and a warning beside it."""
    broken = llama(seed=0)
    with torch.no_grad():
        broken.lm_head.weight[3] = float("nan")
    decoder(target, broken).generate([Request([5, 6, 7], 4)])
    assert "NaN" not in caplog.text, "a draft may propose what it likes"
    decoder(broken, None).generate([Request([5, 6, 7], 4), Request([5], 4)])
    assert caplog.text.count("logits of request 0 are NaN") == 1


@pytest.mark.parametrize("gamma", [0, 1, 4])
def test_a_stop_string_takes_all_tokens_of_its_first_character_with_it(target, gamma):
    """A character of two bytes, each a token: the first one is neither kept nor streamed, though no text came of it alone."""
    whole = decoder(target, None).generate([Request([5, 6, 7], 40, ignore_eos=True)])[0].token_ids
    at = next(i for i in range(4, 39) if not {*whole[i : i + 2]} & {*whole[:i]} and whole[i] != whole[i + 1])
    halves = dict(zip(whole[at : at + 2], "é".encode(), strict=True))

    def text(ids: list[int]) -> str:
        return bytes(halves.get(i, ord("a") + i % 26) for i in ids).decode("utf-8", errors="replace")

    config = DecoderConfig(num_speculative_tokens=gamma)
    maker = SpeculativeDecoder(target, target if gamma else None, config, detokenize=text)
    streamed = []
    for event in maker.stream([Request([5, 6, 7], 40, stop=["é"], ignore_eos=True)]):
        streamed += event.token_ids
    assert (event.output.token_ids, event.output.text) == (whole[:at], text(whole[:at]))
    assert streamed == whole[:at]
    # Cut in the middle of the character: the text is that of the tokens, whether or not a string was looked for.
    cut = maker.generate([Request([5, 6, 7], at + 1, stop=stop, ignore_eos=True) for stop in ((), ["never"])])
    assert [output.text for output in cut] == [text(whole[: at + 1])] * 2
