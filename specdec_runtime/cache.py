"""Static KV cache with slots: every row has its own write position, and a rollback moves a position.

Shape legend: S slots, C capacity (positions per slot), B rows of a forward, L its positions, T positions attended to,
K kv heads, D head size.
"""

from dataclasses import dataclass, field
from typing import Any, Optional

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

SCRATCH = 64  # positions at the end of each slot where rows that sit a forward out may write
LENGTH_STEP = 64  # attended lengths are rounded up to this: few shapes, and vector kernels without a tail


@dataclass
class Window:
    """Which part of the cache the forward under way writes and reads; shared by all layers."""

    write_positions_BL: Tensor = field(default_factory=lambda: torch.empty(0, 0, dtype=torch.long))
    first_slot: int = 0
    num_rows: int = 0
    num_cached: int = 0
    _write_index: dict[int, Tensor] = field(default_factory=dict)

    def begin(self, *, write_positions_BL: Tensor, first_slot: int, num_cached: int) -> None:
        """Sets what the next forward writes and reads."""
        self.write_positions_BL, self.first_slot, self.num_cached = write_positions_BL, first_slot, num_cached
        self.num_rows = write_positions_BL.shape[0]
        self._write_index.clear()

    def write_index(self, num_kv_heads: int, capacity: int) -> Tensor:
        """Rows of a flat [S*K*C, D] cache that the forward writes, [B*K*L]; the same for all layers with as many heads."""
        if num_kv_heads not in self._write_index:
            device = self.write_positions_BL.device
            last_slot = self.first_slot + self.num_rows
            heads = torch.arange(self.first_slot * num_kv_heads, last_slot * num_kv_heads, device=device)
            starts_BK1 = (heads * capacity).view(self.num_rows, num_kv_heads, 1)
            self._write_index[num_kv_heads] = (starts_BK1 + self.write_positions_BL[:, None]).flatten()
        return self._write_index[num_kv_heads]


class SlotLayer(CacheLayerMixin):
    """One layer's keys and values, [S, K, C, D]: slots and heads are one batch of matrices to a matrix product, no copy."""

    is_compileable = False
    is_sliding = False

    def __init__(self, num_slots: int, capacity: int, window: Window) -> None:
        super().__init__()
        self.num_slots, self.capacity, self.window = num_slots, capacity, window
        self._views: tuple[Tensor, Tensor] = (torch.empty(0), torch.empty(0))
        self._viewed: Optional[tuple[int, int, int]] = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        for name, states in (("keys", key_states), ("values", value_states)):
            shape = (self.num_slots, states.shape[1], self.capacity, states.shape[3])
            # Zeros, because a masked position is multiplied by 0 and must not hold a NaN.
            setattr(self, name, torch.zeros(shape, dtype=states.dtype, device=states.device))
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Writes [B, K, L, D] at the rows' positions; returns views [B, K, T, D] of what may be attended to."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        index = self.window.write_index(key_states.shape[1], self.capacity)
        self.keys.view(-1, self.keys.shape[3]).index_copy_(0, index, key_states.flatten(0, 2))
        self.values.view(-1, self.values.shape[3]).index_copy_(0, index, value_states.flatten(0, 2))
        if torch.compiler.is_compiling():  # a kept view would be a second input over the same memory
            return self._view(self.keys), self._view(self.values)
        viewed = (self.window.first_slot, self.window.num_rows, self.window.num_cached)
        if viewed != self._viewed:
            self._views = (self._view(self.keys), self._view(self.values))
            self._viewed = viewed
        return self._views

    def _view(self, slots: Tensor) -> Tensor:
        w = self.window
        return slots[w.first_slot : w.first_slot + w.num_rows, :, : w.num_cached]

    def move(self, source: int, destination: int, num_positions: int) -> None:
        """Copies the first positions of a slot to another slot."""
        for slots in (self.keys, self.values):
            if slots is not None:
                slots[destination, :, :num_positions] = slots[source, :, :num_positions]

    def is_finite(self, slot: int) -> bool:
        """Whether all that lies in a slot is numbers, by their sum: it takes a small part of the time of a look at each of them, and
        where it overflows a slot is emptied for nothing."""
        return all(slots is None or bool(slots[slot].sum().isfinite()) for slots in (self.keys, self.values))

    def clear(self, slot: int) -> None:
        """Fills a slot with zeros."""
        for slots in (self.keys, self.values):
            if slots is not None:
                slots[slot] = 0

    def gather(self, sources_BD: Tensor, destinations_BD: Tensor) -> None:
        """Within each of the first slots, copies positions to other positions; all are read before any is written."""
        rows_B1 = torch.arange(sources_BD.shape[0], device=sources_BD.device)[:, None]
        for slots in (self.keys, self.values):
            assert slots is not None
            slots[rows_B1, :, destinations_BD] = slots[rows_B1, :, sources_BD]

    def copy_of(self, slot: int, num_positions: int) -> tuple[Tensor, Tensor]:
        """Keys and values [K, P, D] of a slot's first positions."""
        assert self.keys is not None
        assert self.values is not None
        return self.keys[slot, :, :num_positions].clone(), self.values[slot, :, :num_positions].clone()

    def put(self, slot: int, keys_values: tuple[Tensor, Tensor]) -> None:
        """Writes a `copy_of` into a slot."""
        for slots, copy in zip((self.keys, self.values), keys_values, strict=True):
            assert slots is not None
            slots[slot, :, : copy.shape[1]] = copy

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.window.num_cached, 0

    def get_seq_length(self) -> int:
        # Positions differ by row and are always passed explicitly.
        return 0

    def get_max_length(self) -> int:
        return self.capacity


class SlotCache(Cache):
    """KV cache of `num_slots` sequences; rows of a forward are a contiguous range of slots."""

    def __init__(self, num_layers: int, num_slots: int, capacity: int) -> None:
        self.window = Window()
        self.slot_layers = [SlotLayer(num_slots, capacity, self.window) for _ in range(num_layers)]
        super().__init__(layers=list(self.slot_layers))
        self.num_slots, self.capacity = num_slots, capacity

    def begin(self, *, positions_BL: Tensor, first_slot: int, num_cached: int) -> None:
        """Sets what the next forward writes (each row's positions) and reads (the first `num_cached` positions)."""
        assert first_slot + positions_BL.shape[0] <= self.num_slots
        assert num_cached <= self.capacity
        self.window.begin(write_positions_BL=positions_BL, first_slot=first_slot, num_cached=num_cached)

    def copy_of(self, slot: int, num_positions: int) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of a slot's first positions, layer by layer."""
        return [layer.copy_of(slot, num_positions) for layer in self.slot_layers]

    def put(self, slot: int, layers: list[tuple[Tensor, Tensor]]) -> None:
        """Writes a `copy_of` into a slot."""
        for layer, keys_values in zip(self.slot_layers, layers, strict=True):
            layer.put(slot, keys_values)

    def clean(self, slot: int) -> None:
        """For a new sequence: empties a slot in which the last one left NaN or infinity. A mask does not keep these out of a sum.
        They spread from layer to layer, so that the last one shows them."""
        if not self.slot_layers[-1].is_finite(slot):
            for layer in self.slot_layers:
                layer.clear(slot)

    def move_slot(self, source: int, destination: int, num_positions: int) -> None:
        """Copies a sequence to another slot."""
        self.clean(destination)
        for layer in self.slot_layers:
            layer.move(source, destination, num_positions)

    def keep_path(self, roots_B: Tensor, path_BD: Tensor) -> None:
        """Behind each root, puts the nodes of a tree that were accepted one after another, in place.

        Args:
            roots_B: position of the root in each of the first slots; node i lies at root + 1 + i. path_BD: nodes, -1 behind
                the last accepted one.
        """
        behind_B1 = roots_B[:, None] + 1
        # A row that a draft with a shorter context does not follow may be longer than its slot; it has no path.
        destinations_BD = behind_B1 + torch.arange(path_BD.shape[1], device=path_BD.device)
        destinations_BD = destinations_BD.clamp(max=self.capacity - 1)
        sources_BD = torch.where(path_BD < 0, destinations_BD, behind_B1 + path_BD)
        if not path_BD.is_cuda and torch.equal(sources_BD, destinations_BD):
            return  # nothing has to move; a GPU would have to wait to know
        for layer in self.slot_layers:
            layer.gather(sources_BD, destinations_BD)


def padded_capacity(capacity: int) -> int:
    """Positions per slot: rounded up, with the scratch positions behind."""
    return -(-capacity // LENGTH_STEP) * LENGTH_STEP + SCRATCH
