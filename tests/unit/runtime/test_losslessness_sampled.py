"""At T>0 the engine's outputs follow the target's warped distribution, whatever the draft, the warpers and the sampler.

Outputs of 4 tokens (the first comes from the prompt's forward, the next 3 from speculative rounds) over a vocabulary of 4
are counted and compared by a chi-square test with the distribution that is
enumerated from Transformers' own forward and logits processors. Each test may fail by chance with probability
ALPHA = 1e-4 (the seeds are fixed, so it either always does or never). With three deliberate faults the same test fails.
"""

import itertools

import pytest
import torch
from scipy.stats import chi2
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specdec_runtime import DecoderConfig, Request, SpeculativeDecoder, judge, tree_judge, verify, verify_tree

VOCAB, LENGTH, NUM_SAMPLES, ALPHA, PROMPT = 4, 4, 3000, 1e-4, [3, 1]

CASES = {
    "temperature": {"temperature": 1.3},
    "top_k": {"temperature": 1.0, "top_k": 2},
    "top_p": {"temperature": 1.0, "top_p": 0.8},
    "min_p": {"temperature": 1.0, "min_p": 0.2},
    "repetition_penalty": {"temperature": 1.0, "repetition_penalty": 1.5},
    "presence_penalty": {"temperature": 1.0, "presence_penalty": 0.8},
    "logit_bias": {"temperature": 1.0, "logit_bias": {1: 1.5, 0: -3.0}},
    "min_new_tokens": {"temperature": 1.0, "min_new_tokens": 2, "ignore_eos": False},
    "all": {"temperature": 0.8, "top_k": 3, "top_p": 0.95, "min_p": 0.02, "repetition_penalty": 1.2},
}


@pytest.fixture(scope="module")
def models(llama):
    shape = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 16, "num_layers": 1}
    return llama(seed=3, **shape), llama(seed=4, **shape)


def warped_by_peer(logits: torch.Tensor, context: list[int], params: dict) -> torch.Tensor:
    """Next-token distribution by Transformers' processors (presence penalty and bias by their formulas)."""
    logits = logits.clone().float()
    for token, value in params.get("logit_bias", {}).items():
        logits[0, token] += value
    ids, generated = torch.tensor([context]), context[len(PROMPT) :]
    processors = LogitsProcessorList()
    if "repetition_penalty" in params:
        logits = RepetitionPenaltyLogitsProcessor(params["repetition_penalty"])(ids, logits)
    for token in set(generated):
        logits[0, token] -= params.get("presence_penalty", 0.0)
    if len(generated) < params.get("min_new_tokens", 0):
        logits[0, 2] = -torch.inf
    processors.append(TemperatureLogitsWarper(params["temperature"]))
    if "top_k" in params:
        processors.append(TopKLogitsWarper(params["top_k"]))
    if "top_p" in params:
        processors.append(TopPLogitsWarper(params["top_p"]))
    if "min_p" in params:
        processors.append(MinPLogitsWarper(params["min_p"]))
    return processors(ids, logits).softmax(dim=-1)[0]


def enumerated(model, params: dict) -> dict[tuple[int, ...], float]:
    """Probability of every output of LENGTH tokens; one that ends early by EOS (id 2) stands for itself."""
    stops = not params.get("ignore_eos", True)
    outputs: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(LENGTH):
        longer: dict[tuple[int, ...], float] = {}
        for output, mass in outputs.items():
            if stops and output and output[-1] == 2:
                longer[output] = mass
                continue
            with torch.inference_mode():
                logits = model(torch.tensor([[*PROMPT, *output]])).logits[:, -1]
            probs = warped_by_peer(logits, [*PROMPT, *output], params)
            for token in range(VOCAB):
                longer[(*output, token)] = mass * float(probs[token])
        outputs = longer
    return outputs


def p_value(models, params: dict, **config) -> float:
    target, draft = models
    decoder = SpeculativeDecoder(
        target, draft, DecoderConfig(max_batch_size=1000, max_draft_tokens=9999, **config)
    )
    request = {"prompt_token_ids": PROMPT, "max_new_tokens": LENGTH, "ignore_eos": True, **params}
    outputs = decoder.generate([Request(**request, seed=i) for i in range(NUM_SAMPLES)])
    assert decoder.stats.num_proposed > NUM_SAMPLES
    expected = enumerated(target, params)
    counts = dict.fromkeys(expected, 0)
    for output in outputs:
        counts[tuple(output.token_ids)] += 1
    assert all(counts[k] == 0 for k, mass in expected.items() if mass == 0.0)
    return chi_square_p_value(counts, expected)


def chi_square_p_value(counts: dict, expected: dict) -> float:
    """Cells with fewer than 5 expected outputs are pooled."""
    pooled_count = pooled_expected = statistic = 0.0
    num_cells = 0
    for key, mass in expected.items():
        if mass * NUM_SAMPLES < 5:
            pooled_count, pooled_expected = pooled_count + counts[key], pooled_expected + mass * NUM_SAMPLES
        else:
            statistic += (counts[key] - mass * NUM_SAMPLES) ** 2 / (mass * NUM_SAMPLES)
            num_cells += 1
    if pooled_expected > 0:
        statistic += (pooled_count - pooled_expected) ** 2 / max(pooled_expected, 1.0)
        num_cells += 1
    return float(chi2.sf(statistic, num_cells - 1))


@pytest.mark.parametrize(("sampler", "name"), itertools.product(("probabilistic", "greedy"), CASES))
def test_outputs_follow_the_target(models, sampler, name):
    """transformers 47932, vllm 9834, TRT-LLM 17701: q is what was sampled, parameters are applied to p, all of them."""
    assert p_value(models, CASES[name], sampler=sampler, num_speculative_tokens=2) > ALPHA


def test_outputs_follow_the_target_with_confidence_exit_and_trimmed_head(models):
    """Stopping early by the draft's confidence, and a q that is zero outside a shortlist, leave p exact."""
    target, draft = models
    assert p_value(models, CASES["temperature"], num_speculative_tokens=2, draft_confidence=0.45) > ALPHA
    decoder = SpeculativeDecoder(
        target,
        draft,
        DecoderConfig(num_speculative_tokens=2, max_batch_size=1000, max_draft_tokens=9999),
        draft_vocab_ids=torch.tensor([0, 3]),
    )
    outputs = decoder.generate(
        [Request(PROMPT, LENGTH, temperature=1.0, ignore_eos=True, seed=i) for i in range(NUM_SAMPLES)]
    )
    expected = enumerated(target, {"temperature": 1.0})
    counts = dict.fromkeys(expected, 0)
    for output in outputs:
        counts[tuple(output.token_ids)] += 1
    assert chi_square_p_value(counts, expected) > ALPHA


@pytest.mark.parametrize("name", CASES)
def test_outputs_follow_the_target_with_looked_up_proposals(models, name):
    """Proposals from the text itself are a one-hot q: any temperature, warper and penalty."""
    lookup = {"drafter": "ngram", "ngram_max": 2, "num_speculative_tokens": 2}
    assert p_value((models[0], None), CASES[name], **lookup) > ALPHA


def test_a_broken_residual_is_found_with_looked_up_proposals(models, monkeypatch):
    monkeypatch.setattr(verify, "residual", lambda p_BV, q_Bn, columns_Bn: p_BV)
    lookup = {"drafter": "ngram", "ngram_max": 2, "num_speculative_tokens": 2}
    assert p_value((models[0], None), CASES["temperature"], **lookup) < ALPHA


def _with(monkeypatch, change):
    """Lets the engine call the rule with arguments that `change` has tampered with."""
    right = verify.verify_chain
    monkeypatch.setattr(judge, "verify_chain", lambda **kwargs: right(**change(dict(kwargs))))


def test_a_broken_residual_is_found(models, monkeypatch):
    """openvino.genai 4190: the correction drawn from p, not from the residual."""
    monkeypatch.setattr(verify, "residual", lambda p_BV, q_Bn, columns_Bn: p_BV)
    assert p_value(models, CASES["temperature"], num_speculative_tokens=2) < ALPHA


def test_a_broken_q_warper_is_found(models, monkeypatch):
    """transformers 47932: the rule is given a q at temperature 1 while the draft was sampled at another one."""

    def change(kwargs):
        q = kwargs["draft_probs_BGN"]
        if q is not None:
            kwargs["draft_probs_BGN"] = q**2 / (q**2).sum(dim=2, keepdim=True)
        return kwargs

    _with(monkeypatch, change)
    assert p_value(models, CASES["temperature"], num_speculative_tokens=2) < ALPHA


def test_a_broken_bonus_is_found(models, monkeypatch):
    """The bonus drawn from the position before its own."""

    def change(kwargs):
        probs = kwargs["target_probs_BTV"].clone()
        if probs.shape[1] > 1:
            probs[:, -1] = probs[:, -2]
        kwargs["target_probs_BTV"] = probs
        return kwargs

    # With the target as its own draft every round ends with a bonus.
    twice = (models[0], models[0])
    assert p_value(twice, CASES["temperature"], num_speculative_tokens=2) > ALPHA
    _with(monkeypatch, change)
    assert p_value(twice, CASES["temperature"], num_speculative_tokens=2) < ALPHA


TREE = {"tree": "3x2", "num_speculative_tokens": 2}


@pytest.mark.parametrize(
    ("sampler", "name"),
    [*itertools.product(("probabilistic",), CASES), ("greedy", "temperature"), ("greedy", "all")],
)
def test_outputs_follow_the_target_with_trees(models, sampler, name):
    """Six branches in one forward, siblings drawn without replacement; where top_k leaves q fewer ids than there are children
    too."""
    assert p_value(models, CASES[name], sampler=sampler, **TREE) > ALPHA


@pytest.mark.parametrize("fault", ["residual", "replacement"])
def test_a_broken_rule_for_trees_is_found(models, monkeypatch, fault):
    """p not updated when a sibling falls; siblings that were tried left in q."""
    right, name = verify_tree.verify_tree, {"residual": "residual", "replacement": "without"}[fault]

    def faulty(*args, **kwargs):
        with monkeypatch.context() as patched:  # what draws the siblings stays right
            patched.setattr(verify_tree, name, lambda distribution, *others: distribution)
            return right(*args, **kwargs)

    monkeypatch.setattr(tree_judge, "verify_tree", faulty)
    assert p_value(models, CASES["temperature"], **TREE) < ALPHA
