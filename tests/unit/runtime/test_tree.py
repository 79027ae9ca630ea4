"""Topologies: what they say about depths, ancestors and children, and what is refused."""

import pytest
import torch

from specdec_runtime.tree import Tree, make_tree

CPU = torch.device("cpu")
# root -> 0, 1; 0 -> 2, 3; 1 -> 4; 3 -> 5
UNEVEN = Tree((-1, -1, 0, 0, 1, 3))


def test_an_uneven_tree():
    assert UNEVEN.depths == (0, 1, 1, 2, 2, 2, 3)
    assert UNEVEN.depth == 3
    assert UNEVEN.children == ((0, 1), (2, 3), (4,), (), (5,), (), ())
    assert UNEVEN.inner == (0, 1, 2, 4)
    assert [list(UNEVEN.positions_at(d)) for d in range(4)] == [[0], [1, 2], [3, 4, 5], [6]]
    assert [UNEVEN.max_children_at(d) for d in range(4)] == [2, 2, 1, 0]
    assert UNEVEN.offsets(CPU).tolist() == [0, 1, 1, 2, 2, 2, 3]
    assert UNEVEN.child_table(CPU).tolist() == [
        [0, 1],
        [2, 3],
        [4, -1],
        [-1, -1],
        [5, -1],
        [-1, -1],
        [-1, -1],
    ]


@pytest.mark.parametrize(
    "tree", [UNEVEN, make_tree("binary3", max_nodes=99), make_tree("3x2x1", max_nodes=99)]
)
def test_a_position_sees_itself_and_its_ancestors(tree):
    sees = tree.sees(CPU)
    for position in range(tree.num_nodes + 1):
        line, at = {position}, position
        while at:
            at = tree.parents[at - 1] + 1
            line.add(at)
        assert set(sees[position].nonzero().flatten().tolist()) == line
        assert len(line) == tree.depths[position] + 1


@pytest.mark.parametrize(
    ("name", "parents"),
    [
        ("chain3", (-1, 0, 1)),
        ("binary2", (-1, -1, 0, 0, 1, 1)),
        ("ternary1", (-1, -1, -1)),
        ("2x1x2", (-1, -1, 0, 1, 2, 2, 3, 3)),
        ("3", (-1, -1, -1)),
        ([-1, 0, 0], (-1, 0, 0)),
    ],
)
def test_names(name, parents):
    assert make_tree(name, max_nodes=8).parents == parents


@pytest.mark.parametrize(
    ("topology", "message"),
    [
        ([], "parent of each node"),
        (4, "tree=4: give .* as text"),
        ([-1, 2], "node 1 has parent 2"),
        ([0], "node 0 has parent 0"),
        ([-2], "node 0 has parent -2"),
        ([-1, -1, 1, 0], "node 3 has parent 0, behind a node with parent 1"),
        ("bush3", "'bush3': unknown"),
        ("2x0", "unknown"),
        ("binary3", "14 nodes or more, above the 8 that are allowed"),
        ("chain9", "above the 8 that are allowed"),
        ("99x99x99x99x99x99", "above the 8 that are allowed"),
        ([-1] * 9, "above the 8 that are allowed"),
    ],
)
def test_wrong_trees_are_refused(topology, message):
    with pytest.raises(ValueError, match=message):
        make_tree(topology, max_nodes=8)
