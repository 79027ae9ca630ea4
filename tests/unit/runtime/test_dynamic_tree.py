"""Trees whose shape is chosen in each round: what grows, what is accepted, and that no output changes."""

import pytest
import torch
import transformers as tr

from specdec_runtime import DecoderConfig, Request, SpeculativeDecoder, tree_judge
from specdec_runtime import dynamic_growth as growth_module
from specdec_runtime.batch import Batch
from specdec_runtime.dynamic_growth import DynamicGrowth
from specdec_runtime.forward import ModelRunner, StepOptions
from specdec_runtime.graphs import Captured, GraphedSteps
from specdec_runtime.layout import RowTrees
from specdec_runtime.tree import DynamicTree, make_tree
from tests.unit.runtime.architectures import ARCHITECTURES
from tests.unit.runtime.test_losslessness_sampled import ALPHA, CASES, p_value

NUM_NEW = 40
TREES = ["dynamic1d1", "dynamic4d4", "dynamic9d3", "dynamic16d4"]


def decoder(target, draft, **config) -> SpeculativeDecoder:
    return SpeculativeDecoder(target, draft, DecoderConfig(**{"max_batch_size": 4, **config}))


@pytest.fixture(scope="module")
def expected(target, prompts, hf_greedy):
    return [hf_greedy(target, prompt, NUM_NEW) for prompt in prompts]


@pytest.fixture(scope="module")
def sharp(llama):
    """A target that is sure of each token, so that the likeliest path is the likeliest tree."""
    model = llama(seed=0, num_layers=3)
    with torch.no_grad():
        model.lm_head.weight.mul_(200)
    return model


# What grows

VOCAB = 12


def probabilities(row: int, path: tuple[int, ...]) -> torch.Tensor:
    """q behind a path, made up."""
    generator = torch.Generator().manual_seed(hash((row, *path)) % 2**31)
    return (2.5 * torch.randn(VOCAB, generator=generator)).softmax(dim=0)


def grown_by_hand(shape: DynamicTree, row: int, depth: int, num_nodes: int) -> set[tuple[int, ...]]:
    """Paths of the kept nodes, by the definition."""
    expanded, children = {(): 1.0}, {}
    for _ in range(depth):
        level = {}
        for path, joint in expanded.items():
            top = probabilities(row, path).topk(growth_module.MAX_CHILDREN)
            level |= {(*path, int(i)): joint * float(q) for q, i in zip(top.values, top.indices, strict=True)}
        children |= level
        best = sorted(level, key=level.__getitem__, reverse=True)[: shape.num_expanded]
        expanded = {path: level[path] for path in best}
    return set(sorted(children, key=children.__getitem__, reverse=True)[:num_nodes])


def grow(target, shape: DynamicTree, *, depth: int, num_nodes: int, num_rows: int = 3) -> growth_module.Grown:
    maker = decoder(target, None)
    rows = [maker._new_row(i, Request([5, 6], 50)) for i in range(num_rows)]
    growth = DynamicGrowth(shape, Batch(rows, vocab_size=VOCAB, device=torch.device("cpu")), None)
    paths: list[list[tuple[int, ...]]] = [[()] for _ in rows]
    for step in range(depth):
        q = [[probabilities(i, path) for path in paths[i]] for i in range(num_rows)]
        growth.add_children(torch.stack([torch.stack(x) for x in q]).log())
        if step + 1 < depth:
            growth.expand()
            paths = [_expanded_paths(growth, row) for row in range(num_rows)]
    return growth.finish(num_nodes, torch.full((num_rows,), depth))


def _expanded_paths(growth: DynamicGrowth, row: int) -> list[tuple[int, ...]]:
    """Read off what each expanded node sees in the draft's block."""
    ids = growth._fed_ids_BP[row].tolist()
    seen = growth.layout.sees_BLT[row]
    return [tuple(ids[place - 1] for place in line.nonzero().flatten().tolist() if place) for line in seen]


def paths_of(grown: growth_module.Grown, row: int) -> list[tuple[int, ...]]:
    parents, ids = grown.trees.parents_BN[row].tolist(), grown.ids_BN[row].tolist()
    paths: list[tuple[int, ...]] = []
    for node, parent in enumerate(parents):
        assert -1 <= parent < node
        paths.append((*(paths[parent] if parent >= 0 else ()), ids[node]))
    return paths


@pytest.mark.parametrize(("num_nodes", "depth"), [(16, 4), (9, 3), (4, 4), (30, 2), (63, 5)])
def test_the_likeliest_nodes_are_kept(target, num_nodes, depth):
    shape = DynamicTree(num_nodes, depth)
    grown = grow(target, shape, depth=depth, num_nodes=num_nodes)
    for row in range(3):
        paths = paths_of(grown, row)
        assert len(set(paths)) == grown.trees.num_nodes
        assert set(paths) == grown_by_hand(shape, row, depth, num_nodes)
    assert paths_of(grown, 0) != paths_of(grown, 1)


def test_layout_and_places_of_a_grown_tree(target):
    shape = DynamicTree(16, 4)
    grown = grow(target, shape, depth=4, num_nodes=16)
    layout = grown.trees.layout
    for row in range(3):
        paths = [(), *paths_of(grown, row)]
        assert layout.offsets_BL[row].tolist() == [len(path) for path in paths]
        for position, path in enumerate(paths):
            seen = {paths[i] for i in layout.sees_BLT[row, position].nonzero().flatten().tolist()}
            assert seen == {path[:n] for n in range(len(path) + 1)}
        places = grown.draft_nodes_BN[row].tolist()
        fed = [place for place in places if place >= 0]
        assert len(set(fed)) == len(fed) and max(fed) < shape.num_draft_places
        # Every parent was fed, at a place of its own depth.
        for path, place in zip(paths[1:], places, strict=True):
            is_parent = any(other[:-1] == path for other in paths[1:])
            assert not is_parent or place // shape.num_expanded == len(path) - 1


def test_a_node_that_is_certain_does_not_push_out_its_parent(target, monkeypatch):
    """Where q is 1 a child is as likely as its parent, to the last bit."""
    monkeypatch.setattr(
        "tests.unit.runtime.test_dynamic_tree.probabilities", lambda row, path: torch.eye(VOCAB)[len(path) + row]
    )
    grown = grow(target, DynamicTree(4, 4), depth=4, num_nodes=4)
    for row in range(3):
        assert paths_of(grown, row) == [tuple(range(row, row + n)) for n in range(1, 5)]


def test_nodes_behind_a_draft_without_numbers_do_not_push_out_their_parents(target, monkeypatch):
    """A draft that gives NaN behind one token: no node stands at a place that is not its own."""
    right = probabilities

    def broken(row: int, path: tuple[int, ...]) -> torch.Tensor:
        is_unsure = len(path) == 1 and right(row, ()).argsort(descending=True).tolist().index(path[0]) >= 2
        return right(row, path) * float("nan") if is_unsure else right(row, path)

    monkeypatch.setattr("tests.unit.runtime.test_dynamic_tree.probabilities", broken)
    grown = grow(target, DynamicTree(9, 3), depth=3, num_nodes=9)
    for row in range(3):
        depths = grown.trees.layout.offsets_BL[row].tolist()
        assert depths == [0, *(len(path) for path in paths_of(grown, row))]


# What is decoded


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
    outputs = decoder(target, random_draft, tree="dynamic9d3", **options).generate(
        [Request(prompt, NUM_NEW) for prompt in prompts]
    )
    assert [o.token_ids for o in outputs] == expected


@pytest.mark.parametrize("name", CASES)
def test_sampled_tokens_are_those_of_plain_decoding(target, near_draft, prompts, name):
    """Each is drawn from p with the numbers that plain decoding uses, proposals or not."""
    requests = [Request(p, NUM_NEW, seed=i, **CASES[name]) for i, p in enumerate(prompts)]
    plain = decoder(target, None).generate(requests)
    for draft in (near_draft, None):
        speculative = decoder(target, draft or target, tree="dynamic9d3")
        outputs = speculative.generate(requests)
        assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]
        assert speculative.stats.num_accepted > 0


def test_penalties_and_biases_follow_the_branch(target, near_draft, prompts):
    penalties = {"repetition_penalty": 1.4, "presence_penalty": 0.5, "min_new_tokens": 12, "logit_bias": {5: 2.0}}
    requests = [Request(prompt, 30, **penalties) for prompt in prompts]
    plain = decoder(target, None).generate(requests)
    for tree in ("chain3", "dynamic9d3"):  # the draft knows the penalties too: it stays as good
        speculative = decoder(target, near_draft, tree=tree)
        assert [o.token_ids for o in speculative.generate(requests)] == [o.token_ids for o in plain]
    assert speculative.stats.block_efficiency > 1.8


@pytest.mark.parametrize("tree", ["dynamic9d3", "dynamic16d4"])
def test_a_draft_that_is_the_target_has_a_full_path_accepted(sharp, tree):
    """Past 500 tokens: no hole is left in either cache when the accepted path has been put in place."""
    speculative = decoder(sharp, sharp, tree=tree)
    output = speculative.generate([Request([5, 6, 7], 520, ignore_eos=True)])[0]
    assert output.stats.num_accepted == output.stats.num_proposed > 0
    depth = make_tree(tree, max_nodes=63).depth
    assert output.stats.num_rounds == -(-519 // (depth + 1))


def test_a_draft_whose_path_is_put_in_the_wrong_place_is_found(sharp, monkeypatch):
    """The draft's places are its own: with the target's, its next rounds read other tokens than were committed."""
    monkeypatch.setattr("specdec_runtime.judge._as_drafted", lambda path_BD, draft_nodes_BN: path_BD)
    output = decoder(sharp, sharp, tree="dynamic9d3").generate([Request([5, 6, 7], 200, ignore_eos=True)])[0]
    assert output.stats.num_accepted < output.stats.num_proposed


def test_it_accepts_more_than_fixed_trees_of_as_many_nodes(target, near_draft, prompts):
    requests = [Request(p, NUM_NEW, ignore_eos=True) for p in prompts]
    chain, fixed, dynamic = (decoder(target, near_draft, tree=t) for t in ("chain3", "2x1x1", "dynamic6d3"))
    for each in (chain, fixed, dynamic):
        each.generate(requests)
    assert chain.stats.block_efficiency < fixed.stats.block_efficiency < dynamic.stats.block_efficiency
    assert dynamic.stats.num_draft_steps <= 3 * dynamic.stats.num_rounds


def test_a_seeded_row_gives_the_same_alone_batched_and_in_any_order(target, near_draft, prompts):
    seeded = [Request(p, 25, temperature=0.9, top_p=0.95, seed=10 + i) for i, p in enumerate(prompts)]
    alone = [decoder(target, near_draft, tree="dynamic9d3", max_batch_size=1).generate([r])[0] for r in seeded]
    mixed = [Request([4, 5, 6], 9), *reversed(seeded), Request([8], 30, speculate=False)]
    outputs = decoder(target, near_draft, tree="dynamic9d3").generate(mixed)
    assert [o.token_ids for o in reversed(outputs[1:-1])] == [o.token_ids for o in alone]
    assert [o.stats.num_accepted for o in reversed(outputs[1:-1])] == [o.stats.num_accepted for o in alone]


def test_logprobs_and_stops_inside_an_accepted_path(target, hf_greedy):
    plain = hf_greedy(target, [5, 6, 7], 30, eos_token_id=None)
    end = plain.index(plain[6]) + 1
    request = Request([5, 6, 7], 30, stop_token_ids=[plain[6]], logprobs=3)
    output = decoder(target, target, tree="dynamic9d4").generate([request])[0]
    assert output.token_ids == plain[:end]
    with torch.inference_mode():
        raw = target(torch.tensor([[5, 6, 7, *output.token_ids]])).logits[0, 2:-1].log_softmax(dim=1)
    assert output.logprobs.top_ids == raw.topk(3, dim=1).indices.tolist()


def test_a_trimmed_head_and_a_short_context(target, llama, prompts, hf_greedy):
    draft = llama(seed=5, num_layers=1, max_position_embeddings=24)
    trimmed = SpeculativeDecoder(
        target,
        draft,
        DecoderConfig(tree="dynamic9d3", max_batch_size=3),
        draft_vocab_ids=torch.tensor([1, 5, 9, 40]),
    )
    outputs = trimmed.generate([Request(p, 30, ignore_eos=True) for p in prompts])
    assert [o.token_ids for o in outputs] == [hf_greedy(target, p, 30, eos_token_id=None) for p in prompts]
    assert "draft's context" in outputs[5].stats.not_speculating


@pytest.mark.parametrize("name", ["gpt2", "qwen2_window", "gemma2"])
def test_architectures(name, hf_greedy):
    torch.manual_seed(0)
    model = tr.AutoModelForCausalLM.from_config(ARCHITECTURES[name]()).eval()
    prompts = [list(range(3, 3 + n)) for n in (4, 45, 1)]
    speculative = decoder(model, model, tree="dynamic9d3", max_batch_size=2)
    outputs = speculative.generate([Request(p, 30) for p in prompts])
    assert [o.token_ids for o in outputs] == [hf_greedy(model, prompt, 30) for prompt in prompts]
    assert speculative.stats.draft_acceptance_rate > 0.5


def test_rows_with_other_trees_read_their_own_paths(target):
    """Logits at each node of two different trees in one forward, against ordinary forwards over prompt, root and path."""
    parents_BN = torch.tensor([[-1, -1, 0, 0, 2], [-1, 0, 1, 1, 3]])
    depths_BN = torch.tensor([[1, 1, 2, 2, 3], [1, 2, 3, 3, 4]])
    trees = RowTrees(parents_BN, 4, growth_module._layout(parents_BN, depths_BN, 4))
    prompts, starts_B = [[5, 6, 7, 8], [9, 3]], torch.tensor([4, 2])
    runner = ModelRunner(target, "target", StepOptions(pads_rows=True))
    runner.allocate(3, 64)  # one slot more than there are rows
    torch.manual_seed(3)
    ids_BT = torch.randint(3, 97, (2, 6))
    with torch.inference_mode():
        for slot, prompt in enumerate(prompts):
            runner.prefill(prompt, 0, slot=slot, chunk=8, wants_logits=False)
        logits = runner.step(ids_BT, starts_B, num_cached=10, layout=trees.layout)
        for row, prompt in enumerate(prompts):
            for position in range(6):
                line, at = [], position
                while at:
                    line.insert(0, at)
                    at = int(parents_BN[row, at - 1]) + 1
                ids = [*prompt, *ids_BT[row, [0, *line]].tolist()]
                expected = target(torch.tensor([ids])).logits[0, -1]
                torch.testing.assert_close(logits[row, position], expected, rtol=1e-4, atol=1e-4)


class Recorded(GraphedSteps):
    """Graphs without a GPU: the first step's computation, closed over what it saw, run again on the static inputs."""

    def _capture(self, compute, *given):
        inputs = tuple(x.clone() for x in given)
        results = compute(*inputs)

        class Replay:
            def replay(self):
                results.logits.copy_(compute(*inputs).logits)

        return Captured(Replay(), inputs, results)


@pytest.mark.parametrize("tree", ["3x2", "dynamic9d3"])
def test_a_graph_gets_the_trees_of_its_own_round(target, near_draft, prompts, expected, tree):
    speculative = decoder(target, near_draft, tree=tree, pack_weights=False)
    for runner in (speculative.target, speculative.drafter.runner):
        runner._graphs, runner._pads_rows = Recorded(), True
    outputs = speculative.generate([Request(prompt, NUM_NEW) for prompt in prompts])
    assert [o.token_ids for o in outputs] == expected
    assert speculative.target._graphs._captured and speculative.drafter.runner._graphs._captured
    eager = decoder(target, near_draft, tree=tree, pack_weights=False, max_batch_size=4)
    eager.generate([Request(prompt, NUM_NEW) for prompt in prompts])
    assert eager.stats.accepted_per_position == speculative.stats.accepted_per_position


# T > 0, by enumeration


@pytest.fixture(scope="module")
def models(llama):
    shape = {"vocab_size": 4, "hidden_size": 16, "intermediate_size": 16, "num_layers": 1}
    return llama(seed=3, **shape), llama(seed=4, **shape)


@pytest.mark.parametrize("name", CASES)
def test_outputs_follow_the_target(models, name):
    assert p_value(models, CASES[name], tree="dynamic5d2", num_speculative_tokens=2) > ALPHA


def test_numbers_that_are_used_twice_are_found(models, monkeypatch):
    """The draw behind an accepted node must not be the one that accepted it."""
    right = tree_judge.verify_tree_by_draws

    def faulty(tree, *, next_uniform_BE, **others):
        return right(tree, next_uniform_BE=next_uniform_BE[:, :1].expand_as(next_uniform_BE), **others)

    monkeypatch.setattr(tree_judge, "verify_tree_by_draws", faulty)
    assert p_value(models, CASES["temperature"], tree="dynamic5d2", num_speculative_tokens=2) < ALPHA


def test_a_path_that_is_accepted_by_its_probability_alone_is_found(models, monkeypatch):
    """The likeliest node stands whenever it is likely enough, and not as often as p says."""
    right = tree_judge.verify_tree_by_draws

    def faulty(tree, *, target_probs_BTV, **others):
        class Sharper:
            def __getitem__(self, index):
                p_BV = target_probs_BTV[index] ** 2
                return p_BV / p_BV.sum(dim=1, keepdim=True)

        return right(tree, target_probs_BTV=Sharper(), **others)

    monkeypatch.setattr(tree_judge, "verify_tree_by_draws", faulty)
    assert p_value(models, CASES["temperature"], tree="dynamic5d2", num_speculative_tokens=2) < ALPHA


def test_draws_that_are_repeated_until_a_node_stands_are_found(models, monkeypatch):
    right = tree_judge.verify_tree_by_draws

    def faulty(tree, *, next_uniform_BE, **others):
        first, second = (right(tree, next_uniform_BE=u, **others) for u in (next_uniform_BE, 1 - next_uniform_BE))
        is_better_B = second.num_accepted_B > first.num_accepted_B
        return type(first)(
            torch.where(is_better_B, second.num_accepted_B, first.num_accepted_B),
            torch.where(is_better_B[:, None], second.path_BD, first.path_BD),
            torch.where(is_better_B, second.next_ids_B, first.next_ids_B),
        )

    monkeypatch.setattr(tree_judge, "verify_tree_by_draws", faulty)
    assert p_value(models, CASES["temperature"], tree="dynamic5d2", num_speculative_tokens=2) < ALPHA


# What is refused


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"tree": "dynamic9d5"}, "num_speculative_tokens=4: below the tree's depth of 5"),
        ({"tree": "dynamic3d4"}, "3 nodes cannot be 4 deep"),
        ({"tree": "dynamic64d4", "max_draft_tokens": 999}, "above the 63 that are allowed"),
        ({"tree": "dynamic9d3", "max_draft_tokens": 8}, "above the 8 that are allowed"),
        ({"tree": "dynamic9"}, "unknown; give .*dynamic16d4"),
        ({"tree": "dynamic9d3", "acceptance": "typical"}, "with the dynamic tree 'dynamic9d3' only 'exact'"),
        ({"tree": "dynamic9d3", "acceptance": "lenient"}, "acceptance='lenient'"),
        ({"tree": "dynamic9d3", "gamma": "auto"}, "gamma='auto'"),
        ({"tree": "dynamic9d3", "drafter": "ngram"}, "drafter='ngram'"),
        ({"tree": "dynamic9d3", "draft_confidence": 0.5}, "draft_confidence=0.5"),
        ({"tree": "dynamic9d3", "verify_width": 9}, "verify_width=9"),
    ],
)
def test_what_does_not_go_with_it_is_refused(config, message):
    with pytest.raises(ValueError, match=message):
        DecoderConfig(**config)


def test_sizes():
    tree = make_tree("dynamic16d4", max_nodes=63)
    assert (tree.num_nodes, tree.depth, tree.num_expanded, tree.num_draft_places) == (16, 4, 4, 12)
    assert DecoderConfig(tree="dynamic16d4").max_proposals == 16
