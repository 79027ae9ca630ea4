"""The rule for trees: by enumeration at T>0, by hand-made walks at T=0, and against the rule for chains.

Two random language models over V ids are tables of next-token distributions for every context. Trees are drawn from q,
judged against p, and completed from p to D + 1 tokens; the counts of all V^(D+1) outputs are compared with their
probabilities under p by a chi-square test. Each test may fail by chance with probability ALPHA = 1e-4 (the seeds are
fixed, so it either always does or never). With deliberate faults the same test fails.
"""

import itertools
import random

import pytest
import torch
from scipy.stats import chi2

from specdec_runtime import verify_tree as module
from specdec_runtime.tree import Tree, make_tree
from specdec_runtime.verify import sample_by_inverse_cdf, verify_chain
from specdec_runtime.verify_tree import (
    TreeVerdict,
    sample_without_replacement,
    verify_tree,
    verify_tree_by_argmax,
    verify_tree_by_verdicts,
)

ALPHA, NUM_SAMPLES = 1e-4, 40_000
TREES = {
    "chain": make_tree("chain2", max_nodes=99),
    "binary": make_tree("binary2", max_nodes=99),
    "wide": make_tree("3x2", max_nodes=99),
    "all_ids": make_tree("4x4", max_nodes=99),
    "uneven": Tree((-1, -1, -1, 0, 0, 1)),
    "deep": make_tree("2x1x2", max_nodes=99),
}


class Tables:
    """Next-token distributions [V] of every context of up to `depth` ids; a context is a number in base V."""

    def __init__(self, seed: int, vocab_size: int, depth: int, *, top_k: int | None = None) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.vocab_size, self.levels = vocab_size, []
        for d in range(depth + 1):
            logits = 1.5 * torch.randn(vocab_size**d, vocab_size, generator=generator)
            if top_k is not None:
                logits[logits < logits.topk(top_k, dim=1).values[:, -1:]] = -torch.inf
            self.levels.append(logits.softmax(dim=1))

    def outputs(self) -> torch.Tensor:
        """Probability of each output of depth + 1 tokens."""
        mass = torch.ones(1, dtype=torch.float64)
        for level in self.levels:
            mass = (mass[:, None] * level.double()).flatten()
        return mass / mass.sum()


class Drawn:
    """A batch of trees drawn from q, with p and q at their positions and the noise to judge them by."""

    def __init__(
        self, tree: Tree, p: Tables, q: Tables, *, greedy: bool = False, replacement: bool = False
    ) -> None:
        torch.manual_seed(0)
        self.tree, self.p, num_rows = tree, p, NUM_SAMPLES
        codes = [torch.zeros(num_rows, dtype=torch.long)] + [torch.empty(0)] * tree.num_nodes
        ids, probs = [torch.empty(0)] * tree.num_nodes, []
        lowest_first = -torch.arange(p.vocab_size, dtype=torch.float32)
        for position in tree.inner:
            nodes = tree.children[position]
            q_BV = q.levels[tree.depths[position]][codes[position]]
            probs.append(q_BV)
            if greedy:
                drawn = q_BV.topk(len(nodes), dim=1).indices
            elif replacement:
                drawn = torch.multinomial(q_BV, len(nodes), replacement=True)
            else:
                drawn = sample_without_replacement(
                    q_BV, torch.rand(num_rows, len(nodes)), lowest_first.expand_as(q_BV)
                )
            for rank, node in enumerate(nodes):
                ids[node] = drawn[:, rank]
                codes[node + 1] = codes[position] * p.vocab_size + ids[node]
        self.ids_BN, self.codes_BT = torch.stack(ids, dim=1), torch.stack(codes, dim=1)
        p_at = [p.levels[depth][code] for depth, code in zip(tree.depths, codes, strict=True)]
        self.arguments = {
            "draft_ids_BN": self.ids_BN,
            "max_depth_B": torch.full((num_rows,), tree.depth),
            "target_probs_BTV": torch.stack(p_at, dim=1),
            "draft_probs_BIC": None if greedy else torch.stack(probs, dim=1),
            "accept_uniform_BN": torch.rand(num_rows, tree.num_nodes),
            "next_uniform_BE": torch.rand(num_rows, tree.depth + 1),
        }

    def judged(self, **changes) -> TreeVerdict:
        return verify_tree(self.tree, **{**self.arguments, **changes})

    def outputs(self, verdict: TreeVerdict) -> torch.Tensor:
        """Accepted path, next token, and the rest drawn from p; as numbers in base V."""
        p = self.p
        at_B = verdict.path_BD.max(dim=1).values + 1
        code_B = self.codes_BT.gather(1, at_B[:, None]).squeeze(1) * p.vocab_size + verdict.next_ids_B
        length_B = verdict.num_accepted_B + 1
        for depth in range(1, self.tree.depth + 1):
            probs = p.levels[depth][code_B.clamp(max=p.vocab_size**depth - 1)]
            longer_B = code_B * p.vocab_size + sample_by_inverse_cdf(probs, torch.rand(len(code_B)))
            code_B = torch.where(length_B == depth, longer_B, code_B)
            length_B = length_B + (length_B == depth)
        return code_B

    def p_value(self, verdict: TreeVerdict) -> float:
        expected = self.p.outputs() * NUM_SAMPLES
        counts = torch.bincount(self.outputs(verdict), minlength=len(expected)).double()
        assert counts[expected == 0].sum() == 0
        is_large = expected >= 5
        cells = torch.cat([expected[is_large], expected[~is_large].sum()[None].clamp(min=1)])
        seen = torch.cat([counts[is_large], counts[~is_large].sum()[None]])
        return float(chi2.sf(float(((seen - cells) ** 2 / cells).sum()), len(cells) - 1))


def drawn(name: str, *, vocab_size: int = 4, q_top_k: int | None = None, **settings) -> Drawn:
    tree = TREES[name]
    p, q = Tables(1, vocab_size, tree.depth), Tables(2, vocab_size, tree.depth, top_k=q_top_k)
    return Drawn(tree, p, q, **settings)


@pytest.mark.parametrize(("name", "greedy"), itertools.product(TREES, (False, True)))
def test_outputs_follow_the_target(name, greedy):
    trees = drawn(name, greedy=greedy)
    assert trees.p_value(trees.judged()) > ALPHA


def test_outputs_follow_the_target_with_five_ids_and_a_wide_tree():
    trees = drawn("wide", vocab_size=5)
    assert trees.p_value(trees.judged()) > ALPHA


@pytest.mark.parametrize("q_top_k", [1, 2])
def test_outputs_follow_the_target_where_q_runs_out_of_ids(q_top_k):
    """Three children of a q with fewer ids: the rest of them were chosen without chance."""
    trees = drawn("wide", q_top_k=q_top_k)
    assert len({tuple(sorted(ids)) for ids in trees.ids_BN[:, :3].tolist()}) <= 4
    assert all(len(set(ids)) == 3 for ids in trees.ids_BN[:100, :3].tolist())
    assert trees.p_value(trees.judged()) > ALPHA


def test_outputs_follow_the_target_in_rows_of_other_depths():
    trees = drawn("binary")
    max_depth_B = torch.arange(NUM_SAMPLES) % 3
    verdict = trees.judged(max_depth_B=max_depth_B)
    assert bool((verdict.num_accepted_B <= max_depth_B).all())
    assert trees.p_value(verdict) > ALPHA


def test_outputs_follow_the_target_with_a_shortlist():
    """q has columns for the ids 0, 1 and 3 only."""
    trees, ids = drawn("binary"), torch.tensor([0, 1, 3])
    short = Tables(3, 3, 2)
    # The same trees, with q moved to the shortlist: draw columns, name ids.
    q = Tables(2, 4, 2)
    for depth, level in enumerate(q.levels):
        level.zero_()
        level[:, ids] = short.levels[depth][torch.arange(len(level)) % 3**depth]
    trees = Drawn(TREES["binary"], trees.p, q)
    full = trees.judged()
    columns = trees.judged(
        draft_probs_BIC=trees.arguments["draft_probs_BIC"][:, :, ids], draft_vocab_ids_C=ids
    )
    assert trees.p_value(full) > ALPHA
    assert all(torch.equal(a, b) for a, b in zip(full, columns, strict=True))


def test_without_the_residual_update_it_is_found(monkeypatch):
    """Siblings tried, and the correction drawn, with p as it was before the first one fell."""
    trees = drawn("binary")
    monkeypatch.setattr(module, "residual", lambda p_BV, q_BV, columns: p_BV)
    assert trees.p_value(trees.judged()) < ALPHA


def test_a_q_with_the_tried_ones_left_in_is_found(monkeypatch):
    """Children drawn without replacement are judged as if they had been drawn with it."""
    trees = drawn("wide")
    monkeypatch.setattr(module, "without", lambda q_BV, ids_B1: q_BV)
    assert trees.p_value(trees.judged()) < ALPHA


def test_children_drawn_with_replacement_are_found():
    trees = drawn("wide", replacement=True)
    assert trees.p_value(trees.judged()) < ALPHA


def test_a_broken_bonus_is_found():
    """Behind a leaf, p of its parent."""
    trees = drawn("binary")
    probs = trees.arguments["target_probs_BTV"].clone()
    for position, nodes in enumerate(trees.tree.children):
        if not nodes:
            probs[:, position] = probs[:, trees.tree.parents[position - 1] + 1]
    assert trees.p_value(trees.judged(target_probs_BTV=probs)) < ALPHA


def test_a_tree_without_branches_is_a_chain():
    trees = drawn("chain")
    arguments = trees.arguments
    verdict = trees.judged()
    chain = verify_chain(
        draft_ids_BG=arguments["draft_ids_BN"],
        num_proposed_B=arguments["max_depth_B"],
        target_probs_BTV=arguments["target_probs_BTV"],
        draft_probs_BGN=arguments["draft_probs_BIC"],
        accept_uniform_BG=arguments["accept_uniform_BN"],
        next_uniform_BT=arguments["next_uniform_BE"],
    )
    assert torch.equal(verdict.num_accepted_B, chain.num_accepted_B)
    assert torch.equal(verdict.next_ids_B, chain.next_ids_B)


def test_each_further_sibling_is_accepted_more_often():
    num_accepted = [
        drawn(name).judged().num_accepted_B.float().mean() for name in ("chain", "binary", "wide")
    ]
    assert num_accepted[0] < num_accepted[1] - 0.1 < num_accepted[1] < num_accepted[2] - 0.05


def test_with_every_id_as_a_child_one_is_always_accepted():
    """A child that fell has no mass left in p: what is left when all others fell is the last one."""
    assert drawn("all_ids").judged().num_accepted_B.tolist() == [2] * NUM_SAMPLES


def walked(tree: Tree, ids: list[int], wanted: list[int], max_depth: int) -> tuple[list[int], int]:
    """By hand: from the root to the child that is wanted, while there is one."""
    at, path = 0, []
    while len(path) < max_depth:
        right = [node for node in tree.children[at] if ids[node] == wanted[at]]
        if not right:
            break
        path.append(right[0])
        at = right[0] + 1
    return path, wanted[at]


def test_at_temperature_0_the_path_of_the_argmax_stands():
    rng = random.Random(0)
    for _ in range(60):
        parents = sorted(
            rng.randrange(-1, max(node, 0)) if node else -1 for node in range(rng.randint(1, 12))
        )
        tree = Tree(tuple(parents))
        ids = [[0] * tree.num_nodes for _ in range(8)]
        for row, nodes in itertools.product(ids, tree.children):
            for node, token_id in zip(nodes, rng.sample(range(13), len(nodes)), strict=True):
                row[node] = token_id
        # The wanted id is one of the children more often than not.
        wanted = [
            [
                row[rng.choice(nodes)] if nodes and rng.random() < 0.8 else rng.randrange(13)
                for nodes in tree.children
            ]
            for row in ids
        ]
        max_depths = [rng.randint(0, tree.depth) for _ in ids]
        verdict = verify_tree_by_argmax(
            tree,
            draft_ids_BN=torch.tensor(ids),
            max_depth_B=torch.tensor(max_depths),
            target_ids_BT=torch.tensor(wanted),
        )
        for row in range(len(ids)):
            path, next_id = walked(tree, ids[row], wanted[row], max_depths[row])
            assert verdict.path_BD[row].tolist() == path + [-1] * (tree.depth - len(path))
            assert verdict.num_accepted_B[row] == len(path)
            assert verdict.next_ids_B[row] == next_id


def test_both_rules_agree_at_temperature_0():
    """One-hot p, children chosen without chance."""
    trees = drawn("uneven", greedy=True)
    best_BT = trees.arguments["target_probs_BTV"].argmax(dim=2)
    one_hot = torch.nn.functional.one_hot(best_BT, 4).float()
    sampled = trees.judged(target_probs_BTV=one_hot)
    exact = verify_tree_by_argmax(
        trees.tree,
        draft_ids_BN=trees.ids_BN,
        max_depth_B=trees.arguments["max_depth_B"],
        target_ids_BT=best_BT,
    )
    assert all(torch.equal(a, b) for a, b in zip(sampled, exact, strict=True))


def test_drawing_without_replacement_follows_q():
    """Ordered pairs: q(a) q(b) / (1 - q(a)). Chance of failing ALPHA."""
    torch.manual_seed(0)
    q = torch.tensor([0.5, 0.2, 0.2, 0.1])
    drawn_BK = sample_without_replacement(q.expand(20_000, 4), torch.rand(20_000, 2), q.expand(20_000, 4))
    statistic = 0.0
    for a, b in itertools.permutations(range(4), 2):
        expected = 20_000 * float(q[a] * q[b] / (1 - q[a]))
        statistic += (int((drawn_BK == torch.tensor([a, b])).all(dim=1).sum()) - expected) ** 2 / expected
    assert float(chi2.sf(statistic, 11)) > ALPHA


@pytest.mark.parametrize("name", TREES)
def test_a_lossy_rule_keeps_the_longest_path_of_accepted_nodes(name):
    tree, generator = TREES[name], torch.Generator().manual_seed(0)
    num_rows, vocab_size = 200, 5
    accept_BN = torch.rand(num_rows, tree.num_nodes, generator=generator) < 0.6
    max_depth_B = torch.randint(0, tree.depth + 1, (num_rows,), generator=generator)
    best_BT = torch.randint(vocab_size, (num_rows, tree.num_nodes + 1), generator=generator)
    verdict = verify_tree_by_verdicts(
        tree,
        accept_BN=accept_BN,
        max_depth_B=max_depth_B,
        target_probs_BTV=torch.nn.functional.one_hot(best_BT, vocab_size).float(),
        next_uniform_BE=torch.rand(num_rows, tree.depth + 1, generator=generator),
    )

    def longest(row: int, position: int, depth: int) -> list[int]:
        paths = [[]]
        for node in tree.children[position]:
            if accept_BN[row, node] and depth < max_depth_B[row]:
                paths.append([node, *longest(row, node + 1, depth + 1)])
        return max(paths, key=len)

    for row in range(num_rows):
        path = longest(row, 0, 0)
        assert int(verdict.num_accepted_B[row]) == len(path)
        found = verdict.path_BD[row].tolist()
        assert found[len(path) :] == [-1] * (tree.depth - len(path))
        # Another path of that length may come first among the nodes: it is as long, and all of it was accepted.
        line = found[: len(path)]
        assert all(accept_BN[row, node] for node in line)
        assert [tree.parents[node] for node in line] == [-1, *line[:-1]][: len(line)]
        assert all(node <= other for node, other in zip(line, path, strict=True))
        assert int(verdict.next_ids_B[row]) == int(best_BT[row, line[-1] + 1 if line else 0])
