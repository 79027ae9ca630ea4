"""How often each guess stands: against the definition, against the rule itself, and against real decoding."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from eval.rounds import rounds_of
from eval.teacher_forcing import Draft
from eval.tree_choice import expected_tokens, greedy_trees, paths_of_tree, topology_of, tree_of_paths
from eval.tree_scores import GuessScores, guess_scores, guesses_that_stand
from specdec_runtime import DecoderConfig, Request, SpeculativeDecoder
from specdec_runtime.medusa_heads import MedusaHeads, heads_of_target
from specdec_runtime.tree import Tree, make_tree
from specdec_runtime.verify_tree import sample_without_replacement, verify_tree

MakeModel = Callable[..., PreTrainedModel]
IDS = torch.arange(0, 40, 3)


def logits_of(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([ids])).logits[0]
    return logits


@pytest.mark.parametrize("vocab_ids", [None, IDS])
@pytest.mark.parametrize(("temperature", "sampler"), [(0.0, "probabilistic"), (1.0, "greedy")])
def test_scores_of_a_model_are_those_of_the_definition(
    make_model: MakeModel, make_rows: Any, vocab_ids: torch.Tensor | None, temperature: float, sampler: str
) -> None:
    target, draft = make_model(0), make_model(0, num_layers=1)
    rows = make_rows(5, temperatures=(temperature,))
    rows[1]["finish_reason"] = "stop"
    scores = guess_scores(
        target, Draft(draft, vocab_ids), rows, temperature=temperature, sampler=sampler, max_depth=3, num_guesses=4
    )
    for row, stands in zip(rows, scores.stands, strict=True):
        prompt, response = row["prompt_token_ids"], row["response_token_ids"]
        expected = np.zeros((len(response), 3, 4))
        p, own = (logits_of(model, prompt + response) for model in (target, draft))
        num_proposed = len(response) - (0 if row.get("finish_reason") == "stop" else 1)
        for start in range(1, len(response)):
            for depth in range(3):
                if start + depth >= num_proposed:
                    continue
                at = len(prompt) + start + depth - 1
                ids = torch.arange(40) if vocab_ids is None else vocab_ids
                guesses = ids[own[at][ids].argsort(descending=True)[:4]]
                for rank, guess in enumerate(guesses):
                    if temperature == 0:
                        expected[start, depth, rank] = guess == p[at].argmax()
                    else:
                        expected[start, depth, rank] = p[at].softmax(0)[guess]
        np.testing.assert_allclose(stands, expected, atol=1e-5)


def shaken_heads(target: PreTrainedModel, num_heads: int = 2) -> MedusaHeads:
    heads = heads_of_target(target, num_heads=num_heads, num_layers=1)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return heads


def test_heads_guess_from_what_was_there_when_the_round_began(make_model: MakeModel, make_rows: Any) -> None:
    target, rows = make_model(0), make_rows(5, temperatures=(0.0,))
    heads = shaken_heads(target)
    scores = guess_scores(
        target, Draft(heads), rows, temperature=0.0, sampler="probabilistic", max_depth=2, num_guesses=3
    )
    for row, stands in zip(rows, scores.stands, strict=True):
        ids, first = row["prompt_token_ids"] + row["response_token_ids"], len(row["prompt_token_ids"])
        p = logits_of(target, ids)
        with torch.no_grad():
            hidden = target.base_model(torch.tensor([ids])).last_hidden_state[0]
            own = heads(hidden)
        expected = np.zeros_like(stands)
        for start in range(1, len(stands)):
            for depth in range(2):
                if start + depth < len(stands) - 1:  # cut: nothing is proposed for the last token
                    # The last committed token is start - 1, and the state is of the position before it.
                    guesses = own[first + start - 2, depth].topk(3).indices
                    expected[start, depth] = (guesses == p[first + start + depth - 1].argmax()).numpy()
        np.testing.assert_array_equal(stands, expected)


@pytest.mark.parametrize("vocab_ids", [None, torch.tensor([0, 1, 3, 4])])
def test_probabilities_of_drawn_guesses_are_those_of_the_rule(vocab_ids: torch.Tensor | None) -> None:
    """The same p and q over and over: how often `verify_tree` lets each of three siblings stand."""
    torch.manual_seed(1)
    num, target_logits = 20_000, 1.5 * torch.randn(1, 6)
    draft_logits = 1.5 * torch.randn(1, 6 if vocab_ids is None else len(vocab_ids))
    many = target_logits.expand(num, -1), draft_logits.expand(num, -1)
    generator = torch.Generator().manual_seed(0)
    stands = guesses_that_stand(*many, vocab_ids, 0.8, "probabilistic", 3, generator).mean(dim=0)
    p, q = (x.div(0.8).softmax(1) for x in many)
    columns = sample_without_replacement(q, torch.rand(num, 3), many[1])
    verdict = verify_tree(
        Tree((-1, -1, -1)),
        draft_ids_BN=columns if vocab_ids is None else vocab_ids[columns],
        max_depth_B=torch.ones(num, dtype=torch.long),
        target_probs_BTV=p[:, None].expand(-1, 4, -1),
        draft_probs_BIC=q[:, None],
        draft_vocab_ids_C=vocab_ids,
        accept_uniform_BN=torch.rand(num, 3),
        next_uniform_BE=torch.rand(num, 2),
    )
    seen = torch.stack([(verdict.path_BD[:, 0] == node).float().mean() for node in range(3)])
    torch.testing.assert_close(stands, seen, atol=0.015, rtol=0)
    short_q = q[0] if vocab_ids is None else torch.zeros(6).index_copy(0, vocab_ids, q[0])
    assert float(stands[0]) == pytest.approx(float(torch.minimum(p[0], short_q).sum()), abs=0.015)


def test_with_every_id_guessed_one_stands() -> None:
    torch.manual_seed(2)
    for sampler in ("probabilistic", "greedy"):
        logits = torch.randn(5, 6), torch.randn(5, 6)
        stands = guesses_that_stand(*logits, None, 1.0, sampler, 8, torch.Generator().manual_seed(0))
        torch.testing.assert_close(stands.sum(dim=1), torch.ones(5))
        assert not stands[:, 6:].any()


def made_up(seed: int, *, lengths: tuple[int, ...] = (9, 14, 2, 1), depths: int = 3, guesses: int = 3) -> GuessScores:
    """Scores of a draft model: each depth is the first one further on; guesses take their share of one chance."""
    rng, stands = np.random.default_rng(seed), []
    for length in lengths:
        chances = rng.dirichlet(np.ones(guesses + 1), length)[:, :guesses]
        chances[length - 1] = 0
        padded = np.concatenate([chances, np.zeros((depths, guesses))])
        stands.append(np.stack([padded[d : d + length] for d in range(depths)], axis=1).astype(np.float32))
    return GuessScores(1.0, "probabilistic", stands)


@pytest.mark.parametrize("gamma", [1, 2, 3])
def test_tau_of_a_chain_is_that_of_the_rounds(gamma: int) -> None:
    scores = made_up(0)
    rounds = rounds_of([stands[:, 0, 0] for stands in scores.stands], gamma, was_cut=[True] * 4)
    tau = float((rounds.num_tokens - 1).sum() / rounds.num_rounds.sum())
    assert expected_tokens(scores, make_tree(f"chain{gamma}", max_nodes=9)) == pytest.approx(tau, rel=1e-5)


@pytest.mark.parametrize("tree", ["chain3", "2x1x1", "3x2", [-1, -1, 0, 1, 1, 2]])
def test_tau_at_temperature_0_is_that_of_real_decoding(make_model: MakeModel, tree: str | list[int]) -> None:
    """Rounds counted from the text alone, and by the engine."""
    target, draft = (make_model(0, eos_token_id=None) for _ in range(2))
    torch.manual_seed(9)
    with torch.no_grad():
        for weight in draft.parameters():
            weight.add_(0.03 * torch.randn_like(weight))
    prompts = torch.randint(3, 40, (8, 5)).tolist()
    requests = [Request(prompt, 40, ignore_eos=True) for prompt in prompts]
    decoder = SpeculativeDecoder(target, draft, DecoderConfig(tree=tree))
    outputs = decoder.generate(requests)
    rows = [
        {"prompt_id": str(i), "source": "s", "prompt_token_ids": prompt, "response_token_ids": output.token_ids,
         "temperature": 0.0, "finish_reason": "length"}
        for i, (prompt, output) in enumerate(zip(prompts, outputs, strict=True))
    ]  # fmt: skip
    scores = guess_scores(
        target, Draft(draft), rows, temperature=0.0, sampler="probabilistic", max_depth=3, num_guesses=3
    )
    assert sum(map(len, scores.stands)) == 320
    tau = (320 - len(rows)) / decoder.stats.num_rounds
    assert 1.2 < tau == pytest.approx(expected_tokens(scores, make_tree(tree, max_nodes=9)))


def total(scores: GuessScores, tree: Tree) -> float:
    """Nodes that stand, summed over all places where a round could start."""
    starts, result = np.concatenate([stands[1:] for stands in scores.stands]).astype(np.float64), 0.0
    for path in paths_of_tree(tree):
        chance = np.ones(len(starts))
        for depth, rank in enumerate(path):
            chance = chance * starts[:, depth, rank]
        result += chance.sum()
    return result


def every_tree(num_nodes: int, max_depth: int) -> set[tuple[int, ...]]:
    """All trees of so many nodes, breadth first."""
    found = {(-1,)}
    for _ in range(num_nodes - 1):
        longer = set()
        for parents in found:
            paths = paths_of_tree(Tree(parents))
            for path in [(), *paths]:
                rank = sum(other[:-1] == path and len(other) == len(path) + 1 for other in paths)
                if len(path) < max_depth and rank < 3:
                    longer.add(tree_of_paths([*paths, (*path, rank)]).parents)
        found = longer
    return found


@pytest.mark.parametrize("max_depth", [2, 3])
def test_no_tree_of_as_many_nodes_stands_more_often(max_depth: int) -> None:
    scores = made_up(3, lengths=(200,))
    ordered = np.sort(scores.stands[0], axis=2)[:, :, ::-1]  # lower ranks stand more often
    scores = GuessScores(1.0, "probabilistic", [ordered.astype(np.float32)])
    trees = greedy_trees(scores, max_nodes=5, max_depth=max_depth)
    assert [tree.num_nodes for tree in trees] == [1, 2, 3, 4, 5]
    assert max(tree.depth for tree in trees) <= max_depth
    for tree in trees:
        best = max(every_tree(tree.num_nodes, max_depth), key=lambda parents: total(scores, Tree(parents)))
        assert total(scores, tree) == pytest.approx(total(scores, Tree(best)))


def test_paths_and_names() -> None:
    for name in ("3x2x1", "chain3", [-1, -1, 0, 1, 1, 2], "binary2"):
        tree = make_tree(name, max_nodes=63)
        assert tree_of_paths(paths_of_tree(tree)[::-1]) == tree
        assert make_tree(topology_of(tree), max_nodes=63) == tree
    assert topology_of(make_tree("binary2", max_nodes=63)) == "2x2"
    assert topology_of(Tree((-1, -1, 0))) == (-1, -1, 0)


def test_rates_by_rank_are_conditional_on_the_path() -> None:
    stands = np.zeros((4, 2, 2), np.float32)
    stands[1:, 0] = [[1, 0], [0, 1], [0, 0]]
    stands[1:, 1] = [[0, 1], [1, 0], [1, 0]]  # the last one is not reached
    assert GuessScores(0.0, "greedy", [stands]).by_rank() == [[pytest.approx(1 / 3)] * 2, [0.5, 0.5]]
    with pytest.raises(ValueError, match="depth 3"):
        expected_tokens(GuessScores(0.0, "greedy", [stands]), make_tree("chain3", max_nodes=9))
