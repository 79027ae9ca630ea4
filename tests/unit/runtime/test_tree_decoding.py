"""Trees in the engine: the target reads all branches at once, one path stands, and no output changes."""

import pytest
import torch
import transformers as tr

from specdec_runtime import DecoderConfig, Request, SpeculativeDecoder
from specdec_runtime.cache import SlotCache
from specdec_runtime.forward import ModelRunner, StepOptions
from specdec_runtime.layout import layout_of
from specdec_runtime.tree import Tree, make_tree
from tests.unit.runtime.architectures import ARCHITECTURES

NUM_NEW = 40
UNEVEN = [-1, -1, -1, 0, 0, 1, 3, 3, 5]
TREES = ["binary3", "3x2", "chain4", "4", UNEVEN]


def decoder(target, draft, **config) -> SpeculativeDecoder:
    return SpeculativeDecoder(target, draft, DecoderConfig(**{"max_batch_size": 4, **config}))


@pytest.fixture(scope="module")
def expected(target, prompts, hf_greedy):
    return [hf_greedy(target, prompt, NUM_NEW) for prompt in prompts]


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("tree", TREES)
def test_greedy_tokens_are_those_of_transformers(target, near_draft, prompts, expected, tree, batch):
    speculative = decoder(target, near_draft, tree=tree, max_batch_size=batch)
    outputs = speculative.generate([Request(prompt, NUM_NEW) for prompt in prompts])
    assert [o.token_ids for o in outputs] == expected
    assert 0 < speculative.stats.num_accepted < speculative.stats.num_proposed


@pytest.mark.parametrize(
    "options",
    [
        {"width_invariant": True},
        {"verify_width": 20},
        {"max_draft_tokens": 20},
        {"sampler": "greedy"},
        {"pack_weights": False},
    ],
)
def test_options_do_not_change_the_output(target, random_draft, prompts, expected, options):
    """With max_draft_tokens=20 four rows have 5 nodes each, the beginning of the tree."""
    outputs = decoder(target, random_draft, tree="3x2", **options).generate(
        [Request(prompt, NUM_NEW) for prompt in prompts]
    )
    assert [o.token_ids for o in outputs] == expected


def test_a_path_that_is_left_where_the_block_had_it_is_found(
    target, near_draft, prompts, expected, monkeypatch
):
    monkeypatch.setattr("specdec_runtime.engine.keep_path", lambda runners, batch, path_BD: None)
    outputs = decoder(target, near_draft, tree="binary3").generate([Request(p, NUM_NEW) for p in prompts])
    assert [o.token_ids for o in outputs] != expected


def test_penalties_and_biases_follow_the_branch(target, near_draft, prompts):
    """What a token has behind it is its own path, not the branches beside it."""
    penalties = {
        "repetition_penalty": 1.4,
        "presence_penalty": 0.5,
        "min_new_tokens": 12,
        "logit_bias": {5: 2.0},
    }
    requests = [Request(prompt, 30, **penalties) for prompt in prompts]
    plain = decoder(target, None).generate(requests)
    outputs = decoder(target, near_draft, tree="binary3").generate(requests)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]


@pytest.mark.parametrize("tree", ["binary3", "3x2", UNEVEN])
def test_a_draft_that_is_the_target_has_a_full_path_accepted(target, tree):
    """Past 500 tokens: no hole is left in either cache when the accepted path has been put in place."""
    speculative = decoder(target, target, tree=tree)
    output = speculative.generate([Request([5, 6, 7], 520, ignore_eos=True)])[0]
    assert output.stats.num_accepted == output.stats.num_proposed > 0
    depth = make_tree(tree, max_nodes=99).depth
    assert output.stats.num_rounds == -(-519 // (depth + 1))
    sampled = speculative.generate(
        [Request([5, 6], 200, temperature=0.9, top_p=0.9, seed=1, ignore_eos=True)]
    )[0]
    assert sampled.stats.draft_acceptance_rate > 0.995  # rounding may cost a few


def test_a_tree_has_more_accepted_than_its_chain(target, near_draft, prompts):
    requests = [
        Request(p, NUM_NEW, temperature=t, seed=1, ignore_eos=True) for p in prompts for t in (0.0, 1.0)
    ]
    chain, binary, wide = (decoder(target, near_draft, tree=tree) for tree in ("chain3", "binary3", "3x3x3"))
    for each in (chain, binary, wide):
        each.generate(requests)
    assert chain.stats.block_efficiency < binary.stats.block_efficiency < wide.stats.block_efficiency


def test_a_tree_without_branches_decodes_as_a_chain(target, near_draft, prompts):
    """The same noise and the same rule: token for token, at any temperature."""
    requests = [Request(p, NUM_NEW, temperature=0.9, top_k=20, seed=i) for i, p in enumerate(prompts)]
    chain = decoder(target, near_draft, num_speculative_tokens=3)
    tree = decoder(target, near_draft, num_speculative_tokens=3, tree="chain3")
    outputs = [[o.token_ids for o in each.generate(requests)] for each in (chain, tree)]
    assert outputs[0] == outputs[1]
    assert chain.stats.accepted_per_position == tree.stats.accepted_per_position
    assert chain.stats.num_draft_steps == tree.stats.num_draft_steps


def test_a_seeded_row_gives_the_same_alone_batched_and_in_any_order(target, near_draft, prompts):
    seeded = [Request(p, 25, temperature=0.9, top_p=0.95, seed=10 + i) for i, p in enumerate(prompts)]
    alone = [
        decoder(target, near_draft, tree="binary2", max_batch_size=1).generate([r])[0].token_ids
        for r in seeded
    ]
    mixed = [Request([4, 5, 6], 9), *reversed(seeded), Request([8], 30, speculate=False)]
    outputs = decoder(target, near_draft, tree="binary2").generate(mixed)
    assert [o.token_ids for o in reversed(outputs[1:-1])] == alone


def test_greedy_rows_beside_sampled_ones_keep_their_branches(target, near_draft, prompts, expected):
    """At temperature 0 q is one-hot, and its further children are chosen without chance."""
    requests = [Request(p, NUM_NEW) for p in prompts[:3]]
    alone = decoder(target, near_draft, tree="3x2").generate(requests)
    beside = decoder(target, near_draft, tree="3x2").generate(
        [*requests, Request([9, 9], 60, temperature=1.0, seed=1, ignore_eos=True)]
    )
    for one, other, tokens in zip(alone, beside, expected, strict=False):
        assert one.token_ids == other.token_ids == tokens
        assert one.stats.accepted_per_position == other.stats.accepted_per_position


def test_logprobs_and_stops_inside_an_accepted_path(target, hf_greedy):
    plain = hf_greedy(target, [5, 6, 7], 30, eos_token_id=None)
    end = plain.index(plain[6]) + 1
    request = Request([5, 6, 7], 30, stop_token_ids=[plain[6]], logprobs=3)
    output = decoder(target, target, tree="binary4").generate([request])[0]
    assert output.token_ids == plain[:end]
    assert output.stats.num_accepted == output.stats.num_proposed <= end - 1
    with torch.inference_mode():
        raw = target(torch.tensor([[5, 6, 7, *output.token_ids]])).logits[0, 2:-1].log_softmax(dim=1)
    assert output.logprobs.top_ids == raw.topk(3, dim=1).indices.tolist()


def test_a_trimmed_head_and_a_short_context(target, llama, prompts, hf_greedy):
    """Rows beyond the draft's context go on plainly beside others that speculate."""
    draft = llama(seed=5, num_layers=1, max_position_embeddings=24)
    requests = [Request(p, 30, ignore_eos=True) for p in prompts]
    trimmed = SpeculativeDecoder(
        target,
        draft,
        DecoderConfig(tree="binary3", max_batch_size=3),
        draft_vocab_ids=torch.tensor([1, 5, 9, 40]),
    )
    outputs = trimmed.generate(requests)
    assert [o.token_ids for o in outputs] == [hf_greedy(target, p, 30, eos_token_id=None) for p in prompts]
    assert "draft's context" in outputs[5].stats.not_speculating


@pytest.mark.parametrize("name", ["gpt2", "qwen2_window", "gemma2"])
def test_architectures(name, hf_greedy):
    """Learned positions, sliding windows past their window, soft caps."""
    torch.manual_seed(0)
    model = tr.AutoModelForCausalLM.from_config(ARCHITECTURES[name]()).eval()
    draft = tr.AutoModelForCausalLM.from_config(ARCHITECTURES[name]()).eval()
    prompts = [list(range(3, 3 + n)) for n in (4, 45, 1)]
    expected = [hf_greedy(model, prompt, 30) for prompt in prompts]
    for proposer in (draft, model):
        speculative = decoder(model, proposer, tree="binary3", max_batch_size=2)
        assert [o.token_ids for o in speculative.generate([Request(p, 30) for p in prompts])] == expected
    assert speculative.stats.draft_acceptance_rate == 1.0


@pytest.mark.parametrize("num_padding", [0, 3])
def test_each_position_of_a_block_reads_its_own_path(target, num_padding):
    """The logits at a node are those of an ordinary forward over prompt, root and path."""
    tree = Tree(tuple(UNEVEN))
    prompts = [[5, 6, 7, 8], [9, 3]]
    runner = ModelRunner(target, "target", StepOptions())
    runner.allocate(2, 64)
    torch.manual_seed(3)
    ids_BT = torch.randint(3, 97, (2, tree.num_nodes + 1))
    starts_B = torch.tensor([4, 2])
    layout = layout_of(tree, tuple(range(tree.num_nodes + 1)), torch.device("cpu"))
    with torch.inference_mode():
        for slot, prompt in enumerate(prompts):
            runner.prefill(prompt, 0, slot=slot, chunk=8, wants_logits=False)
        block = torch.nn.functional.pad(ids_BT, (0, num_padding))
        logits = runner.step(block, starts_B, num_cached=4 + block.shape[1], layout=layout)
        for row, prompt in enumerate(prompts):
            for position in range(tree.num_nodes + 1):
                line, at = [], position
                while at:
                    line.insert(0, at)
                    at = tree.parents[at - 1] + 1
                ids = [*prompt, *ids_BT[row, [0, *line]].tolist()]
                expected = target(torch.tensor([ids])).logits[0, -1]
                torch.testing.assert_close(logits[row, position], expected, rtol=1e-4, atol=1e-4)


def filled_cache() -> SlotCache:
    """Keys 0 to 17 over two slots of nine positions, 100 more in the second layer; values are minus the first layer's keys."""
    cache = SlotCache(2, num_slots=3, capacity=9)
    states = torch.arange(2 * 9, dtype=torch.float32).view(2, 1, 9, 1)
    for layer in range(2):
        cache.begin(positions_BL=torch.arange(9).expand(2, 9), first_slot=0, num_cached=9)
        cache.update(states + 100 * layer, -states, layer)
    return cache


def test_an_accepted_path_is_put_in_place():
    cache = filled_cache()
    # Roots at 2 and at 7, beyond which there is one position only.
    cache.keep_path(torch.tensor([2, 7]), torch.tensor([[1, 4, -1], [-1, -1, -1]]))
    for layer in range(2):
        keys = cache.slot_layers[layer].keys[:, 0, :, 0] - 100 * layer
        assert keys[0].tolist() == [0, 1, 2, 4, 7, 5, 6, 7, 8]
        assert keys[1].tolist() == list(range(9, 18))
        assert cache.slot_layers[layer].values[0, 0, :, 0].tolist() == [0, -1, -2, -4, -7, -5, -6, -7, -8]


@pytest.mark.parametrize(
    ("path_BD", "num_moves"),
    [
        ([[0, 1, -1], [-1, -1, -1]], 0),
        ([[-1, -1, -1], [0, 1, 2]], 0),
        ([[0, 2, -1], [-1, -1, -1]], 2),
        ([[0, 1, 2], [1, -1, -1]], 2),
    ],
)
def test_nothing_is_moved_where_all_accepted_nodes_lie_in_place(path_BD, num_moves, monkeypatch):
    cache, moved = filled_cache(), []
    for layer in cache.slot_layers:
        gather = layer.gather
        monkeypatch.setattr(layer, "gather", lambda *args, gather=gather: moved.append(gather(*args)))
    before = [layer.keys.clone() for layer in cache.slot_layers]
    cache.keep_path(torch.tensor([2, 3]), torch.tensor(path_BD))
    assert len(moved) == num_moves
    is_same = all(torch.equal(a, layer.keys) for a, layer in zip(before, cache.slot_layers, strict=True))
    assert is_same == (num_moves == 0)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"tree": "binary3", "num_speculative_tokens": 2},
            "num_speculative_tokens=2: below the tree's depth of 3",
        ),
        ({"tree": "binary2", "gamma": "auto"}, "gamma='auto'"),
        ({"tree": "binary2", "drafter": "ngram"}, "drafter='ngram'"),
        ({"tree": "binary2", "acceptance": "lenient"}, "acceptance='lenient'"),
        ({"tree": "binary2", "acceptance": "synthetic"}, "acceptance='synthetic'"),
        ({"tree": "binary2", "draft_confidence": 0.5}, "draft_confidence=0.5"),
        ({"tree": "binary3", "verify_width": 14}, "verify_width=14"),
        ({"tree": "binary3", "max_draft_tokens": 8}, "above the 8 that are allowed"),
        ({"tree": "64", "max_draft_tokens": 999}, "above the 63"),
        ({"tree": [0]}, "node 0 has parent 0"),
    ],
)
def test_what_does_not_go_with_a_tree_is_refused(config, message):
    with pytest.raises(ValueError, match=message):
        DecoderConfig(**config)


def test_models_and_observers_that_do_not_go_with_a_tree(target, random_draft):
    config = DecoderConfig(tree="3x2")
    with pytest.raises(ValueError, match="on_round"):
        SpeculativeDecoder(target, random_draft, config, on_round=print)
    with pytest.raises(ValueError, match="3 children"):
        SpeculativeDecoder(target, random_draft, config, draft_vocab_ids=torch.tensor([3, 4]))
    assert DecoderConfig(tree="3x2", num_speculative_tokens=0).topology is None
