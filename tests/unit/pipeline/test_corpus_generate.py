"""Generation: the ids, the stored log-probabilities, the sampling rule and the fast attention against plain Transformers."""

import copy

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM, PreTrainedModel

from pipeline.corpus.decode import fast_attention, new_cache
from pipeline.corpus.generate import Generation, Job, Sampling, TransformersGenerator, common_prefix
from pipeline.corpus.sampling import sample
from tests.unit.pipeline.corpus_samples import tiny_model

EOS = 2
STOPS = frozenset([EOS])
# Of different lengths, and with the EOS id, which is the pad id too, inside.
PROMPTS = [
    [1, 50, EOS, 60],
    [1, 70],
    [1, 80, 81, EOS, 82, 83, EOS, 84, 85],
    [1, 90, 91],
    [1, 99, 98, 97, 96, 95],
]


def generate(
    prompts: list[list[int]], sampling: Sampling, *, batch_size: int = 8, seed: int = 0
) -> list[Generation]:
    jobs = [Job(prompt, seed + index) for index, prompt in enumerate(prompts)]
    return TransformersGenerator(tiny_model(), batch_size=batch_size).generate(jobs, sampling)


def plain_greedy(model: PreTrainedModel, prompt: list[int], max_new_tokens: int) -> list[int]:
    ids = list(prompt)
    for _ in range(max_new_tokens):
        with torch.inference_mode():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] == EOS:
            break
    return ids[len(prompt) :]


def test_greedy_rows_of_a_padded_batch_equal_plain_decoding_without_cache() -> None:
    """Also where pad == eos: the mask goes by length (trl 6357)."""
    results = generate(PROMPTS, Sampling(0.0, 40, STOPS))
    expected = [plain_greedy(tiny_model(), prompt, 40) for prompt in PROMPTS]
    assert [result.token_ids for result in results] == expected
    assert len({len(tokens) for tokens in expected}) > 1, "rows should finish at different steps"


def test_prefix_that_all_prompts_share_is_run_once_and_changes_nothing() -> None:
    system = [1, 40, 41, 42, EOS, 43, 44, 45, 46]
    prompts = [system + rest for rest in ([50, 51, 52, 53, 54], [60], [70, EOS, 71])]
    fed: list[int] = []
    model = tiny_model()
    handle = model.model.embed_tokens.register_forward_pre_hook(
        lambda module, inputs: fed.append(inputs[0].numel())
    )
    try:
        results = generate(prompts, Sampling(0.0, 20, STOPS, topk=4))
    finally:
        handle.remove()
    assert fed[:2] == [len(system), 3 * 5]
    assert [r.token_ids for r in results] == [plain_greedy(model, prompt, 20) for prompt in prompts]
    assert [
        common_prefix(x) for x in ([[1, 2, 3], [1, 2, 4]], [[1, 2], [1, 2, 3]], [[1, 2, 3]], [[5], [6]])
    ] == [2, 1, 0, 0]


def test_a_row_is_the_same_alone_and_in_any_batch() -> None:
    """vllm 10863: rows of one batch must not depend on each other."""
    sampling = Sampling(1.0, 30, STOPS, top_p=0.9)
    jobs = [Job(prompt, 100 + index) for index, prompt in enumerate(PROMPTS)]
    together = TransformersGenerator(tiny_model(), batch_size=8).generate(jobs, sampling)
    one_by_one = TransformersGenerator(tiny_model(), batch_size=1).generate(jobs, sampling)
    assert [r.token_ids for r in together] == [r.token_ids for r in one_by_one]


def test_seed_decides_the_sample() -> None:
    sampling = Sampling(1.0, 30, STOPS)
    first, again, other = (generate(PROMPTS, sampling, seed=seed) for seed in (0, 0, 50))
    assert [r.token_ids for r in first] == [r.token_ids for r in again]
    assert [r.token_ids for r in first] != [r.token_ids for r in other]


def test_finish_reasons_and_no_invented_eos() -> None:
    """speculators 835: rows cut by length are said to be, and get no EOS."""
    results = generate(PROMPTS * 4, Sampling(1.0, 25, STOPS), batch_size=7)
    assert {result.finish_reason for result in results} == {"stop", "length"}
    for result in results:
        stops = [token == EOS for token in result.token_ids]
        if result.finish_reason == "stop":
            assert stops[-1] and not any(stops[:-1])
        else:
            assert len(result.token_ids) == 25 and not any(stops)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_topk_is_the_log_softmax_of_a_full_forward(temperature: float) -> None:
    for prompt, result in zip(
        PROMPTS, generate(PROMPTS, Sampling(temperature, 20, STOPS, topk=16)), strict=True
    ):
        assert result.topk_ids is not None and result.topk_logprobs is not None
        with torch.inference_mode():
            logits = tiny_model()(torch.tensor([prompt + result.token_ids])).logits[0, len(prompt) - 1 : -1]
        expected = logits.float().log_softmax(-1)
        assert result.topk_ids.shape == (len(result.token_ids), 16)
        values, ids = expected.topk(16)
        stored = torch.from_numpy(result.topk_logprobs).float()
        torch.testing.assert_close(stored, values, atol=3e-3, rtol=2e-3)
        torch.testing.assert_close(
            expected.gather(1, torch.from_numpy(result.topk_ids).long()), values, atol=1e-4, rtol=1e-4
        )
        if temperature == 0:
            assert result.topk_ids[:, 0].tolist() == ids[:, 0].tolist() == result.token_ids


def test_a_row_with_broken_logits_fails_alone() -> None:
    model = copy.deepcopy(tiny_model())
    with torch.no_grad():
        model.model.embed_tokens = torch.nn.Embedding.from_pretrained(
            model.model.embed_tokens.weight.clone(), freeze=True
        )
        model.model.embed_tokens.weight[70] = float("nan")
    jobs = [Job(prompt, index) for index, prompt in enumerate(PROMPTS)]
    results = TransformersGenerator(model, batch_size=8).generate(jobs, Sampling(0.0, 12, STOPS, topk=4))
    assert [result.failure for result in results] == [None, "non_finite_logits", None, None, None]
    assert [r.token_ids for r in results if not r.failure] == [
        plain_greedy(tiny_model(), prompt, 12) for prompt in PROMPTS if 70 not in prompt
    ]


def test_on_tokens_counts_every_token() -> None:
    counts: list[int] = []
    jobs = [Job(prompt, index) for index, prompt in enumerate(PROMPTS)]
    results = TransformersGenerator(tiny_model(), batch_size=2).generate(
        jobs, Sampling(0.0, 30, STOPS), counts.append
    )
    assert sum(counts) == sum(len(result.token_ids) for result in results)


def frequencies(logits: torch.Tensor, top_p: float, num: int = 20_000) -> torch.Tensor:
    """Shares of each token over evenly spaced uniform numbers: inverse-CDF sampling must give p to 1/num."""
    uniforms = (torch.arange(num, dtype=torch.float64) + 0.5) / num
    tokens = sample(logits.expand(num, -1), uniforms, top_p=top_p)
    return torch.bincount(tokens, minlength=logits.shape[-1]).double() / num


def test_sampling_follows_the_distribution() -> None:
    logits = torch.randn(50, generator=torch.Generator().manual_seed(0)) * 2
    torch.testing.assert_close(frequencies(logits, 1.0), logits.double().softmax(-1), atol=1e-4, rtol=0)


@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.95])
def test_nucleus_is_the_smallest_that_reaches_top_p(top_p: float) -> None:
    logits = torch.randn(50, generator=torch.Generator().manual_seed(1)) * 2
    probs = logits.double().softmax(-1)
    kept: set[int] = set()
    for token in probs.argsort(descending=True).tolist():
        kept.add(token)
        if sum(probs[k].item() for k in kept) >= top_p:
            break
    expected = torch.tensor(
        [probs[token].item() if token in kept else 0.0 for token in range(50)], dtype=torch.float64
    )
    torch.testing.assert_close(frequencies(logits, top_p), expected / expected.sum(), atol=2e-4, rtol=0)


def test_nucleus_wider_than_the_candidates_is_still_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.zeros(40)
    monkeypatch.setattr("pipeline.corpus.sampling._TOP_P_CANDIDATES", 4)
    assert int((frequencies(logits, 0.5) > 0).sum()) == 20


def test_tokens_without_probability_are_never_chosen() -> None:
    logits = torch.tensor([-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf])
    uniforms = torch.tensor([0.0, 0.25, 0.5, 1.0 - 2**-53], dtype=torch.float64)
    assert set(sample(logits.expand(4, -1), uniforms).tolist()) == {1, 3}
    assert set(sample(logits.expand(4, -1), uniforms, top_p=0.999).tolist()) <= {1, 3}


@pytest.mark.parametrize("window", [None, 6])
def test_fast_attention_gives_the_same_logits(window: int | None) -> None:
    """Grouped heads, left padding, and layers with a sliding window, against a forward without cache."""
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        sliding_window=window,
        initializer_range=0.3,
    )
    model = MistralForCausalLM(config).eval()
    prompts = [[5, 6, 7, 8, 9, 10, 11, 12], [20, 21]]
    results = TransformersGenerator(model, batch_size=2).generate(
        [Job(prompt, 0) for prompt in prompts], Sampling(0.0, 20, frozenset())
    )
    for prompt, result in zip(prompts, results, strict=True):
        assert result.token_ids == plain_greedy(model, prompt, 20)
    assert model.config._attn_implementation == "sdpa", "the user's model is left as it was"


def test_cache_is_written_in_place_and_keeps_chosen_rows() -> None:
    cache = new_cache(tiny_model(), capacity=10)
    first, second = torch.randn(3, 2, 4, 8), torch.randn(3, 2, 1, 8)
    cache.update(first, first + 1, 0)
    keys, values = cache.update(second, second + 1, 0)
    assert torch.equal(keys, torch.cat([first, second], dim=2)) and torch.equal(values, keys + 1)
    cache.layers[0].batch_select_indices(torch.tensor([0, 2]))
    assert torch.equal(cache.layers[0].keys, keys[[0, 2]]) and cache.get_seq_length() == 5


def test_fast_attention_is_undone_after_an_error() -> None:
    model = tiny_model()
    with pytest.raises(RuntimeError, match="stop"), fast_attention(model):
        assert model.config._attn_implementation != "sdpa"
        raise RuntimeError("stop")
    assert model.config._attn_implementation == "sdpa"
