"""Topologies of token trees: which guess follows which.

A tree hangs from the last committed token, its root. Node i is a guess for the token behind node `parents[i]`, or behind the
root where that is -1. The target reads root and nodes as one block: the root at position 0, node i at position i + 1.

Shape legend: T positions of the block, N = T - 1 nodes, K most children of a position, D depth.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

_BRANCHES = {"chain": 1, "binary": 2, "ternary": 3}
NAMES = (
    "'chain4', 'binary3', 'ternary2' (kind and depth), the branches of each depth, such as '3x2x1', or 'dynamic16d4' (at most 16 "
    "nodes, chosen in each round, at most 4 deep)"
)


@dataclass(frozen=True)
class Tree:
    """A topology, breadth first: siblings stand side by side, and so do the nodes of a depth.

    Args:
        parents: per node, the index of the node before it, or -1 for the root; never falling.

    Raises:
        ValueError: no nodes, a parent that does not come before its child, or nodes in another order; names the node.
    """

    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.parents:
            raise ValueError(
                f"tree=[]: give the parent of each node, -1 for the last committed token, or one of {NAMES}"
            )
        for node, parent in enumerate(self.parents):
            if not -1 <= parent < node:
                raise ValueError(
                    f"tree: node {node} has parent {parent}; a parent is an earlier node, or -1 for the last committed token"
                )
            if node and parent < self.parents[node - 1]:
                raise ValueError(
                    f"tree: node {node} has parent {parent}, behind a node with parent {self.parents[node - 1]}; list the "
                    "nodes breadth first, so that parents never fall"
                )

    @property
    def num_nodes(self) -> int:
        """N."""
        return len(self.parents)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Per position, its distance from the root: 0, then 1 or more for each node."""
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent + 1] + 1)
        return tuple(depths)

    @property
    def depth(self) -> int:
        """Most tokens that can be accepted."""
        return self.depths[-1]

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """Per position, the nodes that follow it."""
        children: list[list[int]] = [[] for _ in range(self.num_nodes + 1)]
        for node, parent in enumerate(self.parents):
            children[parent + 1].append(node)
        return tuple(map(tuple, children))

    @cached_property
    def inner(self) -> tuple[int, ...]:
        """Positions with children, in order; what proposes is asked for q at these."""
        return tuple(position for position, nodes in enumerate(self.children) if nodes)

    @property
    def num_lanes(self) -> int:
        """Most nodes of one depth, which share a position: so many uniform numbers are needed for it."""
        return max(map(self.depths.count, range(1, self.depth + 1)))

    @property
    def num_draft_places(self) -> int:
        """Places behind the root's that a draft's keys and values need."""
        return self.num_nodes

    def parent_table(self, device: torch.device) -> Tensor:
        """[1, N]: `parents`, the same for all rows."""
        return torch.tensor([self.parents], device=device)

    def prefix(self, *, max_depth: int, max_nodes: int) -> "Tree":
        """The first nodes, of up to this depth; both limits at least 1."""
        num_nodes = sum(depth <= max_depth for depth in self.depths[1:])
        return Tree(self.parents[: min(num_nodes, max_nodes)])

    def positions_at(self, depth: int) -> range:
        """Positions of a depth; one run, because the order is breadth first."""
        first = self.depths.index(depth)
        return range(first, first + self.depths.count(depth))

    def max_children_at(self, depth: int) -> int:
        """Most children of a position of this depth."""
        return max(len(self.children[position]) for position in self.positions_at(depth))

    def offsets(self, device: torch.device) -> Tensor:
        """[T]: distance of each position from the root, which is what its position id is ahead of the root's."""
        return torch.tensor(self.depths, device=device)

    def sees(self, device: torch.device) -> Tensor:
        """[T, T], entry [i, j]: whether position j is position i or an ancestor of it, the root included."""
        sees = torch.eye(self.num_nodes + 1, dtype=torch.bool)
        for node, parent in enumerate(self.parents):
            sees[node + 1] |= sees[parent + 1]
        return sees.to(device)

    def child_table(self, device: torch.device) -> Tensor:
        """[T, K]: the nodes that follow each position, -1 behind the last of them."""
        num = max(map(len, self.children))
        return torch.tensor([[*nodes, *[-1] * (num - len(nodes))] for nodes in self.children], device=device)

    def line_table(self, device: torch.device) -> Tensor:
        """[N, D]: the nodes from the root to each node, itself included; -1 behind it."""
        lines: list[list[int]] = []
        for node, parent in enumerate(self.parents):
            lines.append([*(lines[parent] if parent >= 0 else []), node])
        return torch.tensor([[*line, *[-1] * (self.depth - len(line))] for line in lines], device=device)


@dataclass(frozen=True)
class DynamicTree:
    """A tree whose shape is chosen in each round, for each row, from what the draft is sure of (EAGLE-2, arXiv 2406.16858;
    OPT-Tree, arXiv 2406.17276).

    Args:
        num_nodes: nodes that are verified. depth: most tokens that can be accepted.

    Raises:
        ValueError: fewer nodes than depths.
    """

    num_nodes: int
    depth: int

    def __post_init__(self) -> None:
        if self.num_nodes < self.depth:
            raise ValueError(
                f"tree='dynamic{self.num_nodes}d{self.depth}': {self.num_nodes} nodes cannot be {self.depth} deep; give as many "
                "nodes as depths, or more"
            )

    def nodes_per_row(self, num_rows: int, max_draft_tokens: int) -> int:
        """Nodes of each of so many rows, of which all together have at most `max_draft_tokens`, and each at least one."""
        return max(1, min(self.num_nodes, max_draft_tokens // num_rows))

    @property
    def num_expanded(self) -> int:
        """Nodes of a depth that get children, the likeliest ones: as wide as a draft's forward is below the root."""
        return max(1, math.isqrt(self.num_nodes))

    @property
    def num_lanes(self) -> int:
        """1: no node is drawn by chance, and one number per depth draws what the target says there."""
        return 1

    @property
    def num_draft_places(self) -> int:
        """Places behind the root's that a draft's keys and values need: those of the expanded nodes."""
        return (self.depth - 1) * self.num_expanded


def tree_of_branches(branches: Sequence[int]) -> Tree:
    """Every position of depth d has `branches[d]` children."""
    parents: list[int] = []
    level = [-1]
    for num in branches:
        first = len(parents)
        parents.extend(parent for parent in level for _ in range(num))
        level = list(range(first, len(parents)))
    return Tree(tuple(parents))


def make_tree(topology: str | Sequence[int], *, max_nodes: int) -> Tree | DynamicTree:
    """A tree from its name or its list of parents.

    Args:
        topology: "chain4", "binary3", "ternary2", the branches of each depth as "3x2x1", "dynamic16d4" (nodes and depth), or
            parents as in `Tree`.
        max_nodes: what `max_draft_tokens` allows.

    Raises:
        ValueError: an unknown name, what the tree's class refuses, or more than `max_nodes` nodes.
    """
    tree: Tree | DynamicTree | None
    if not isinstance(topology, (str, Sequence)):
        raise ValueError(f"tree={topology!r}: give {NAMES}, as text, or the list of parents")
    dynamic = re.fullmatch(r"dynamic([1-9]\d?)d([1-9]\d?)", topology) if isinstance(topology, str) else None
    if dynamic is not None:
        num_nodes = int(dynamic[1])
        tree = DynamicTree(num_nodes, int(dynamic[2])) if num_nodes <= max_nodes else None
    elif isinstance(topology, str):
        branches = _branches_of(topology)
        num_nodes, level = 0, 1
        for num in branches:  # counted before it is built: "9x9x9x9x9x9x9x9" must not fill the memory
            level *= num
            num_nodes += level
            if num_nodes > max_nodes:
                break
        tree = tree_of_branches(branches) if num_nodes <= max_nodes else None
    else:
        num_nodes = len(topology)
        tree = Tree(tuple(int(parent) for parent in topology)) if num_nodes <= max_nodes else None
    if tree is None:
        raise ValueError(
            f"tree={topology!r}: {num_nodes} nodes or more, above the {max_nodes} that are allowed (max_draft_tokens, "
            "and never more than 63); take a smaller tree"
        )
    return tree


def _branches_of(name: str) -> list[int]:
    kind = re.fullmatch(r"(chain|binary|ternary)([1-9]\d?)", name)
    if kind:
        return [_BRANCHES[kind[1]]] * int(kind[2])
    if re.fullmatch(r"[1-9]\d?(x[1-9]\d?)*", name):
        return [int(num) for num in name.split("x")]
    raise ValueError(f"tree={name!r}: unknown; give {NAMES}, or the list of parents")
