"""Blocks whose tokens are not a chain: where their keys go, which position each token has, and what it sees.

Shape legend: B rows, L tokens of a forward, T positions of the whole tree (the root and its nodes), C cached positions.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn

from specdec_runtime.tree import Tree


@dataclass(frozen=True, eq=False)
class BlockLayout:
    """L tokens of a tree whose root has its keys at `starts_B`.

    `slots_L`: where a token's keys go, counted from the root's place: each token of a tree has a place of its own.
    `offsets_L`: its position, counted from the root's: the tokens of one depth share it.
    `sees_LT`: whether it attends to each place of the tree; it attends to all before the root.
    """

    slots_L: Tensor
    offsets_L: Tensor
    sees_LT: Tensor

    def padded(self, num_tokens: int) -> "BlockLayout":
        """With tokens that are not used behind the last one, as far as `num_tokens`."""
        num = num_tokens - len(self.slots_L)
        if num == 0:
            return self
        behind = self.slots_L[-1] + 1 + torch.arange(num, device=self.slots_L.device)
        slots_L = torch.cat([self.slots_L, behind])
        sees_LT = nn.functional.pad(self.sees_LT, (0, 0, 0, num))
        sees_LT[-num:, 0] = True  # the softmax of a token that sees nothing is no number
        return BlockLayout(slots_L, nn.functional.pad(self.offsets_L, (0, num)), sees_LT)

    def mask(self, starts_B: Tensor, num_cached: int, dtype: torch.dtype) -> Tensor:
        """Additive [B, 1, L, C] over the cached positions."""
        num_places = self.sees_LT.shape[1]
        place_BC = torch.arange(num_cached, device=starts_B.device) - starts_B[:, None]
        sees_LBC = self.sees_LT[:, place_BC.clamp(0, num_places - 1)] & (place_BC < num_places)
        hidden_B1LC = ~(sees_LBC | (place_BC < 0)).transpose(0, 1)[:, None]
        return torch.zeros(hidden_B1LC.shape, dtype=dtype, device=starts_B.device).masked_fill_(
            hidden_B1LC, -torch.inf
        )


@cache
def layout_of(tree: Tree, positions: tuple[int, ...], device: torch.device) -> BlockLayout:
    """The layout of a forward over these positions of the tree; the same object each time."""
    index_L = torch.tensor(positions, device=device)
    return BlockLayout(index_L, tree.offsets(device)[index_L], tree.sees(device)[index_L])
