"""Blocks whose tokens are not a chain: where their keys go, which position each token has, and what it sees.

Shape legend: B rows, or 1 where all rows have the same tree; L tokens of a forward, T positions of the whole tree (the root and
its N nodes), C cached positions.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn

from specdec_runtime.tree import Tree


@dataclass(frozen=True, eq=False)
class BlockLayout:
    """L tokens of a tree whose root has its keys at `starts_B`.

    `slots_BL`: where a token's keys go, counted from the root's place: each token of a tree has a place of its own.
    `offsets_BL`: its position, counted from the root's: the tokens of one depth share it.
    `sees_BLT`: whether it attends to each place of the tree; it attends to all before the root.
    `is_by_row`: the trees differ from row to row, and from round to round.
    """

    slots_BL: Tensor
    offsets_BL: Tensor
    sees_BLT: Tensor
    is_by_row: bool = False

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """All of it."""
        return self.slots_BL, self.offsets_BL, self.sees_BLT

    def with_rows(self, num_padding: int) -> "BlockLayout":
        """With so many rows more, which mean nothing."""
        slots_BL, offsets_BL, sees_BLT = (torch.cat([x, x[:1].expand(num_padding, *x.shape[1:])]) for x in self.tensors)
        return BlockLayout(slots_BL, offsets_BL, sees_BLT, is_by_row=True)

    def padded(self, num_tokens: int) -> "BlockLayout":
        """With tokens that are not used behind the last one, as far as `num_tokens`."""
        num = num_tokens - self.slots_BL.shape[1]
        if num == 0:
            return self
        behind_BL = self.slots_BL[:, -1:] + 1 + torch.arange(num, device=self.slots_BL.device)
        slots_BL = torch.cat([self.slots_BL, behind_BL], dim=1)
        sees_BLT = nn.functional.pad(self.sees_BLT, (0, 0, 0, num))
        sees_BLT[:, -num:, 0] = True  # the softmax of a token that sees nothing is no number
        return BlockLayout(slots_BL, nn.functional.pad(self.offsets_BL, (0, num)), sees_BLT)

    def mask(self, starts_B: Tensor, num_cached: int, dtype: torch.dtype) -> Tensor:
        """Additive [B, 1, L, C] over the cached positions."""
        num_tokens, num_places = self.sees_BLT.shape[1:]
        place_BC = torch.arange(num_cached, device=starts_B.device) - starts_B[:, None]
        at_BLC = place_BC.clamp(0, num_places - 1)[:, None].expand(-1, num_tokens, -1)
        sees_BLC = self.sees_BLT.expand(len(starts_B), -1, -1).gather(2, at_BLC)
        sees_BLC = (sees_BLC & (place_BC < num_places)[:, None]) | (place_BC < 0)[:, None]
        mask_BLC = torch.zeros(sees_BLC.shape, dtype=dtype, device=starts_B.device)
        return mask_BLC.masked_fill_(~sees_BLC, -torch.inf)[:, None]


@dataclass(frozen=True, eq=False)
class RowTrees:
    """A tree for each row, of N nodes each: `parents_BN` as `Tree.parents`, `layout` of the block of all positions."""

    parents_BN: Tensor
    depth: int
    layout: BlockLayout

    @property
    def num_nodes(self) -> int:
        """N."""
        return self.parents_BN.shape[1]

    def parent_table(self, device: torch.device) -> Tensor:
        """`parents_BN`."""
        return self.parents_BN


@cache
def layout_of(tree: Tree, positions: tuple[int, ...], device: torch.device) -> BlockLayout:
    """The layout of a forward over these positions of the tree; the same object each time."""
    index_L = torch.tensor(positions, device=device)
    return BlockLayout(index_L[None], tree.offsets(device)[index_L][None], tree.sees(device)[index_L][None])


def block_layout(tree: Tree | RowTrees, device: torch.device) -> BlockLayout:
    """The layout of a forward over the root and all nodes."""
    return tree.layout if isinstance(tree, RowTrees) else layout_of(tree, tuple(range(tree.num_nodes + 1)), device)
