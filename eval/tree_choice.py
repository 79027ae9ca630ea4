"""Which tree? The nodes that stand most often, and what a tree of them brings per round.

Shapes: P responses, T longest response, S positions where a round could start, D depths, K guesses, N nodes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from eval.tree_scores import GuessScores
from eval.tree_timing import TreeTimes
from specdec_runtime.tree import Tree

Array = NDArray[np.float64]
Path = tuple[int, ...]  # the rank of each guess on the way to a node


@dataclass(frozen=True)
class TreePrediction:
    """`tau`: tokens per round of decoding; `round_ms`, and `speedup` over plain decoding with the same target forwards."""

    tree: Tree
    tau: float
    round_ms: float
    speedup: float


def greedy_trees(scores: GuessScores, *, max_nodes: int, max_depth: int) -> list[Tree]:
    """Trees of 1, 2, ... nodes: each is the one before it and the node that stands most often of those that can be added, with its
    path (Medusa, arXiv 2401.10774, section 2.3.3; Sequoia, arXiv 2402.12374).

    How often is counted over paths and not multiplied from ranks, since guesses that are right come in runs.
    """
    starts_SDK = np.concatenate([stands[1:] for stands in scores.stands]).astype(np.float64)
    max_depth, num_guesses = min(max_depth, starts_SDK.shape[1]), starts_SDK.shape[2]
    stands_of: dict[Path, Array] = {(): np.ones(len(starts_SDK))}
    open_paths: dict[Path, float] = {}

    def open_path(path: Path) -> None:
        if len(path) <= max_depth and path[-1] < num_guesses:
            stands_of[path] = stands_of[path[:-1]] * starts_SDK[:, len(path) - 1, path[-1]]
            open_paths[path] = float(stands_of[path].sum())

    open_path((0,))
    chosen: list[Path] = []
    trees = []
    while open_paths and len(chosen) < max_nodes:
        # Of equals the shortest, and then the one of the lowest ranks.
        best = min(open_paths, key=lambda path: (-open_paths[path], len(path), path))
        del open_paths[best]
        chosen.append(best)
        open_path((*best[:-1], best[-1] + 1))
        open_path((*best, 0))
        trees.append(tree_of_paths(chosen))
    return trees


def tree_of_paths(paths: Sequence[Path]) -> Tree:
    """The tree whose nodes are these; each one's beginnings, and those of lower ranks, are among them."""
    ordered = sorted(paths, key=lambda path: (len(path), path))
    index = {path: node for node, path in enumerate(ordered)}
    return Tree(tuple(index[path[:-1]] if len(path) > 1 else -1 for path in ordered))


def paths_of_tree(tree: Tree) -> list[Path]:
    """The ranks on the way to each node, in the tree's order."""
    paths: list[Path] = []
    for node, parent in enumerate(tree.parents):
        rank = tree.children[parent + 1].index(node)
        paths.append((*(paths[parent] if parent >= 0 else ()), rank))
    return paths


def expected_tokens(scores: GuessScores, tree: Tree) -> float:
    """tau of decoding the responses with this tree: tokens per round, the prompt's not among them.

    As in `eval.rounds`, rounds are a Markov chain over the positions where they start. At temperature 0 it is what decoding gives;
    above, guesses of different positions are taken as independent given the text.

    Raises:
        ValueError: the tree is deeper than what was scored.
    """
    num_depths = scores.stands[0].shape[1]
    if tree.depth > num_depths:
        raise ValueError(f"a tree of depth {tree.depth}: guesses were scored for {num_depths} depths only")
    lengths_P = np.array([len(stands) for stands in scores.stands])
    longest = int(lengths_P.max())
    stands_PTDK = np.zeros((len(lengths_P), longest, *scores.stands[0].shape[1:]))
    for i, stands in enumerate(scores.stands):
        stands_PTDK[i, : len(stands)] = stands
    stands_of: dict[Path, Array] = {(): np.ones((len(lengths_P), longest))}
    # reach [P, T, D + 2]: the share of rounds from each start of which this many tokens or more stand.
    reach_PTD = np.zeros((len(lengths_P), longest, tree.depth + 2))
    reach_PTD[:, :, 0] = 1
    for path in paths_of_tree(tree):
        guess_PT = stands_PTDK[:, :, len(path) - 1, path[-1]] if path[-1] < stands_PTDK.shape[3] else 0.0
        stands_of[path] = stands_of[path[:-1]] * guess_PT
        reach_PTD[:, :, len(path)] += stands_of[path]
    starts_PT = np.zeros((len(lengths_P), longest + tree.depth + 2))
    starts_PT[:, 1] = 1
    for start in range(1, longest):
        starts_PT[:, start] *= start < lengths_P
        ends_PD = reach_PTD[:, start, :-1] - reach_PTD[:, start, 1:]
        starts_PT[:, start + 1 : start + 2 + tree.depth] += starts_PT[:, start, None] * ends_PD
    num_rounds = float(starts_PT[:, 1:longest].sum())
    return float((lengths_P - 1).sum()) / num_rounds if num_rounds else 1.0


def predict_tree(scores: GuessScores, tree: Tree, times: TreeTimes) -> TreePrediction:
    """tau from the text and milliseconds from this device."""
    tau, round_ms = expected_tokens(scores, tree), times.round_ms(tree)
    return TreePrediction(tree, tau, round_ms, tau * times.plain_ms / round_ms)


def predict_all(scores: GuessScores, times: TreeTimes, *, max_nodes: int, max_depth: int) -> list[TreePrediction]:
    """Greedy trees of every size and depth bound, chains among them, the best prediction first."""
    found: dict[tuple[int, ...], Tree] = {}
    for depth in range(1, max_depth + 1):
        chain = Tree(tuple(range(-1, depth - 1)))
        for tree in (chain, *greedy_trees(scores, max_nodes=max_nodes, max_depth=depth)):
            found.setdefault(tree.parents, tree)
    predictions = [predict_tree(scores, tree, times) for tree in found.values()]
    return sorted(predictions, key=lambda p: (-p.speedup, p.tree.num_nodes))


def is_chain(tree: Tree) -> bool:
    """Whether no position has two guesses."""
    return tree.num_nodes == tree.depth


def topology_of(tree: Tree) -> str | tuple[int, ...]:
    """As settings name it: the branches of each depth where every position has as many, as "3x2x1", else the parents."""
    branches = []
    for depth in range(tree.depth):
        counts = {len(tree.children[position]) for position in tree.positions_at(depth)}
        if len(counts) > 1:
            return tree.parents
        branches.append(str(counts.pop()))
    return "x".join(branches)
