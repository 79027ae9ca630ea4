"""Transformers' own decoding as backends: right tokens, right counts, and nothing ignored."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from specdec_runtime.backends.hf_assisted import HFAssisted
from specdec_runtime.backends.hf_generate import HFGenerate
from specdec_runtime.request import Request

torch.set_num_threads(1)
PROMPTS = [[3, 4, 5], [9, 8, 7, 6, 5, 4, 3, 11, 12], [2, 2, 7], [30]]


def make_model(seed: int, num_layers: int = 2) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=40, hidden_size=32, intermediate_size=64, num_hidden_layers=num_layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, eos_token_id=2, pad_token_id=2, initializer_range=0.3,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    """Its generation config would change every output if it were in force."""
    model = make_model(0)
    model.generation_config.repetition_penalty = 1.5
    model.generation_config.do_sample = True
    return model


@torch.no_grad()
def greedy_by_hand(model: PreTrainedModel, request: Request, stop_ids: tuple[int, ...] = (2,)) -> list[int]:
    """Argmax of one full unpadded pass per token."""
    ids = list(request.prompt_token_ids)
    while len(ids) - len(request.prompt_token_ids) < request.max_new_tokens:
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] in stop_ids:
            break
    return ids[len(request.prompt_token_ids) :]


@pytest.mark.parametrize("options", [{}, {"static_cache": True}])
def test_batched_greedy_equals_greedy_by_hand(target: LlamaForCausalLM, options: dict[str, Any]) -> None:
    requests = [Request(prompt, max_new_tokens=8 + 7 * i) for i, prompt in enumerate(PROMPTS)]
    outputs = HFGenerate(target, max_batch_size=3, **options).generate(requests)
    for request, output in zip(requests, outputs, strict=True):
        expected = greedy_by_hand(target, request)
        assert output.token_ids == expected
        assert output.finish_reason == ("stop" if expected[-1] == 2 else "length")
    assert target.generation_config.repetition_penalty == 1.5


@pytest.mark.parametrize("gamma", [1, 3, 5])
def test_assisted_greedy_equals_greedy_by_hand(target: LlamaForCausalLM, gamma: int) -> None:
    """transformers 30042, 47912, 47195: other tokens than greedy, tokens after EOS, more tokens than asked
    for.
    """
    requests = [Request(prompt, max_new_tokens=2 + 9 * i) for i, prompt in enumerate(PROMPTS)]
    for draft in (make_model(1, num_layers=1), copy.deepcopy(target)):
        outputs = HFAssisted(target, draft, num_speculative_tokens=gamma).generate(requests)
        assert [o.token_ids for o in outputs] == [greedy_by_hand(target, r) for r in requests]


def test_plain_counts_one_token_per_forward(target: LlamaForCausalLM) -> None:
    output = HFGenerate(target).generate([Request(PROMPTS[0], max_new_tokens=9, ignore_eos=True)])[0]
    assert output.stats.num_committed == len(output.token_ids) == 9
    assert output.stats.block_efficiency == 1.0
    assert len(output.token_times_s) == 9
    assert all(a < b for a, b in zip(output.token_times_s, output.token_times_s[1:], strict=False))


def test_the_target_as_its_own_assistant_accepts_everything(target: LlamaForCausalLM) -> None:
    """Fails if padding is guessed from ids, if the schedule moves, or if the confidence threshold cuts
    proposals.
    """
    request = Request(PROMPTS[0], max_new_tokens=41, ignore_eos=True)
    output = HFAssisted(target, copy.deepcopy(target), num_speculative_tokens=4).generate([request])[0]
    # 8 rounds of 5, then one token is left, for which nothing is proposed.
    assert output.stats.num_rounds_by_accepted == [1, 0, 0, 0, 8]
    assert output.stats.num_proposed == output.stats.num_accepted == 32
    assert output.stats.num_committed == 41
    assert output.stats.num_rounds + output.stats.num_prefills == 9
    assert len(output.token_times_s) == 41


def test_counts_are_the_proposals_that_equal_the_output(target: LlamaForCausalLM) -> None:
    """sglang 11572: accepted excludes the bonus; an accepted EOS counts, nothing behind it does."""
    draft = make_model(0)
    with torch.no_grad():
        draft.lm_head.weight += 0.15 * torch.randn_like(draft.lm_head.weight)
    for prompt in PROMPTS:
        request = Request(prompt, max_new_tokens=40)
        output = HFAssisted(target, draft, num_speculative_tokens=3).generate([request])[0]
        committed, position, accepted, proposed = greedy_by_hand(target, request), 0, [0, 0, 0], [0, 0, 0]
        while position < len(committed):
            # The draft ends its own proposals at EOS, and one place is kept for the bonus.
            room = min(3, 40 - position - 1)
            so_far = Request([*prompt, *committed[:position]], max_new_tokens=max(room, 1))
            proposals = greedy_by_hand(draft, so_far)[:room]
            num_ok = 0
            for i, token_id in enumerate(proposals):
                proposed[i] += 1
                same = position + i < len(committed) and committed[position + i] == token_id
                if same and num_ok == i:
                    num_ok += 1
                    accepted[i] += 1
            position += num_ok + 1
        assert output.stats.accepted_per_position == accepted
        assert output.stats.proposed_per_position == proposed
        assert output.stats.num_accepted < output.stats.num_committed


@pytest.mark.parametrize("backend", ["plain", "assisted"])
def test_sampling_follows_the_warped_target(target: LlamaForCausalLM, backend: str) -> None:
    """First two tokens at temperature .8, top-k 6, against the enumerated distribution; error rate 1e-4."""
    chi2 = pytest.importorskip("scipy.stats").chi2
    num_samples = 1500
    requests = [
        Request([3, 4, 5], max_new_tokens=2, temperature=0.8, top_k=6, ignore_eos=True, seed=seed)
        for seed in range(num_samples if backend == "plain" else num_samples // 4)
    ]
    runner = HFGenerate(target, max_batch_size=500) if backend == "plain" else HFAssisted(
        target, make_model(1, num_layers=1), num_speculative_tokens=2
    )  # fmt: skip
    seen = np.zeros((40, 40))
    for output in runner.generate(requests):
        seen[tuple(output.token_ids)] += 1
    expected = np.zeros((40, 40))
    with torch.no_grad():
        first = _warped(target, [3, 4, 5])
        for token_id in first.nonzero()[:, 0].tolist():
            expected[token_id] = float(first[token_id]) * _warped(target, [3, 4, 5, token_id]).numpy()
    expected *= len(requests)
    assert seen[expected == 0].sum() == 0
    frequent = expected >= 5
    observed = np.append(seen[frequent], seen[~frequent].sum())
    predicted = np.append(expected[frequent], expected[~frequent].sum())
    keep = predicted > 0
    statistic = ((observed - predicted)[keep] ** 2 / predicted[keep]).sum()
    assert chi2.sf(statistic, int(keep.sum()) - 1) > 1e-4


def _warped(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    logits = model(torch.tensor([ids])).logits[0, -1].double() / 0.8
    logits[logits < logits.topk(6).values[-1]] = -torch.inf
    return logits.softmax(-1)


def test_a_seed_gives_the_same_output_again_and_leaves_the_global_stream_alone(
    target: LlamaForCausalLM,
) -> None:
    request = Request(PROMPTS[1], max_new_tokens=12, temperature=1.0, seed=7, ignore_eos=True)
    backend = HFGenerate(target)
    torch.manual_seed(5)
    state = torch.random.get_rng_state()
    first = backend.generate([request])[0].token_ids
    assert torch.equal(state, torch.random.get_rng_state())
    torch.manual_seed(6)
    assert backend.generate([request])[0].token_ids == first
    other = Request(PROMPTS[1], max_new_tokens=12, temperature=1.0, seed=8, ignore_eos=True)
    assert backend.generate([other])[0].token_ids != first


def test_requests_of_different_parameters_keep_their_own_and_their_order(target: LlamaForCausalLM) -> None:
    requests = [
        Request(PROMPTS[0], max_new_tokens=10),
        Request(PROMPTS[1], max_new_tokens=10, temperature=0.7, seed=1),
        Request(
            PROMPTS[2], max_new_tokens=10, stop_token_ids=[greedy_by_hand(target, Request(PROMPTS[2], 10))[1]]
        ),
        Request(PROMPTS[3], max_new_tokens=10, min_new_tokens=10),
        Request(PROMPTS[0], max_new_tokens=10, repetition_penalty=1.3),
    ]
    backend = HFGenerate(target)
    together = backend.generate(requests)
    assert [o.token_ids for o in together] == [backend.generate([r])[0].token_ids for r in requests]
    assert len(together[2].token_ids) == 2
    assert together[2].finish_reason == "stop"
    assert len(together[3].token_ids) == 10


@pytest.mark.parametrize(
    ("field", "value"),
    [("presence_penalty", 0.5), ("logit_bias", {3: 1.0}), ("stop", ("x",)), ("logprobs", 0)],
)
def test_what_cannot_be_applied_is_refused_by_name(
    target: LlamaForCausalLM, field: str, value: object
) -> None:
    """TRT-LLM 17701: penalties silently ignored."""
    request = Request([3], **{field: value})  # type: ignore[arg-type]
    for backend in (HFGenerate(target), HFAssisted(target, target, num_speculative_tokens=1)):
        with pytest.raises(ValueError, match=field):
            backend.generate([request])


def test_assisted_generation_does_not_speculate_against_the_word(target: LlamaForCausalLM) -> None:
    request = Request([3], 2, speculate=False)
    assert len(HFGenerate(target).generate([request])) == 1
    with pytest.raises(ValueError, match="speculate=False"):
        HFAssisted(target, target, num_speculative_tokens=1).generate([request])


def test_assisted_generation_refuses_batches(target: LlamaForCausalLM) -> None:
    with pytest.raises(ValueError, match="batch 1 only"):
        HFAssisted(target, target, num_speculative_tokens=2, max_batch_size=4)
    with pytest.raises(ValueError, match="num_speculative_tokens"):
        HFAssisted(target, target, num_speculative_tokens=0)
