"""Sets and multimaps of 64-bit hashes in flat arrays: at most 32 bytes an entry, where Python's take over a hundred."""

from array import array
from collections.abc import Iterator

_MIN_SLOTS = 1024
_EMPTY = 0


class HashSet:
    """A set of 64-bit numbers, for millions of content hashes: 8 bytes a slot, half of the slots or fewer in use.

    Two different texts of n fall on one hash with a probability of about n^2 / 2^65: 3e-8 for a million.
    """

    def __init__(self) -> None:
        self._slots = array("Q", bytes(8 * _MIN_SLOTS))
        self._num_used = 0

    def __len__(self) -> int:
        return self._num_used

    def __contains__(self, key: int) -> bool:
        return self._slots[self._find(key or 1)] != _EMPTY

    def add(self, key: int) -> bool:
        """Add a number in [0, 2^64); True when it is new."""
        key = key or 1  # 0 marks a free slot
        slot = self._find(key)
        if self._slots[slot] == key:
            return False
        self._slots[slot] = key
        self._num_used += 1
        if 2 * self._num_used > len(self._slots):
            self._grow()
        return True

    def _find(self, key: int) -> int:
        slots, mask = self._slots, len(self._slots) - 1
        slot = key & mask
        while slots[slot] not in (_EMPTY, key):
            slot = (slot + 1) & mask
        return slot

    def _grow(self) -> None:
        old = self._slots
        self._slots = array("Q", bytes(16 * len(old)))
        for key in old:
            if key != _EMPTY:
                self._slots[self._find(key)] = key


class HashMultiMap:
    """64-bit keys to small numbers, several for one key: 12 bytes a slot, half of the slots or fewer in use."""

    def __init__(self) -> None:
        self._keys = array("Q", bytes(8 * _MIN_SLOTS))
        self._values = array("I", bytes(4 * _MIN_SLOTS))
        self._num_used = 0

    def add(self, key: int, value: int) -> None:
        """Remember `value`, in [0, 2^32), under `key`, in [0, 2^64)."""
        self._place(key or 1, value)
        self._num_used += 1
        if 2 * self._num_used > len(self._keys):
            old = zip(self._keys, self._values, strict=True)
            self._keys, self._values = (
                array("Q", bytes(16 * len(self._keys))),
                array("I", bytes(8 * len(self._values))),
            )
            for old_key, old_value in old:
                if old_key != _EMPTY:
                    self._place(old_key, old_value)

    def get(self, key: int) -> Iterator[int]:
        """The numbers under `key`, in an order that follows from the additions."""
        key, mask = key or 1, len(self._keys) - 1
        slot = key & mask
        while self._keys[slot] != _EMPTY:
            if self._keys[slot] == key:
                yield self._values[slot]
            slot = (slot + 1) & mask

    def _place(self, key: int, value: int) -> None:
        mask = len(self._keys) - 1
        slot = key & mask
        while self._keys[slot] != _EMPTY:
            slot = (slot + 1) & mask
        self._keys[slot], self._values[slot] = key, value
