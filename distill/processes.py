"""The processes of one training: one, or several that `accelerate launch` started.

What only one of them may do (files, measuring, reporting) process 0 does, and the others learn its outcome from it; whatever
has a collective inside, all of them do, in the same order.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch.distributed as dist

from distill.config import ENGINES

T = TypeVar("T")


@dataclass(frozen=True)
class Processes:
    """This process and its fellows. `engine` is None for a training that was not launched."""

    rank: int = 0
    count: int = 1
    engine: str | None = None

    @classmethod
    def launched(cls, engine: str) -> "Processes":
        """Those of the process group that has been joined."""
        assert engine in ENGINES
        return cls(dist.get_rank(), dist.get_world_size(), engine)

    @property
    def is_main(self) -> bool:
        """Whether this one writes, measures and reports."""
        return self.rank == 0

    @property
    def shards(self) -> bool:
        """Whether no process has the whole draft."""
        return self.engine in ("fsdp", "deepspeed")

    def from_main(self, value: T) -> T:
        """Process 0's value, in all of them; the others' is not looked at."""
        if self.count == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0)
        return values[0]

    def wait(self) -> None:
        """Until all of them are here."""
        if self.count > 1:
            dist.barrier()

    def main_first(self, make: Callable[[], T]) -> T:
        """`make()` in process 0, then in the others, for what the first writes and they read."""
        if not self.is_main:
            self.wait()
        made = make()
        if self.is_main:
            self.wait()
        self.wait()
        return made
