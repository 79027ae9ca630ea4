"""Times phases of a round: by the host's clock on a CPU, by events (no synchronisation until read) on a GPU."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


class Stopwatch:
    """Adds up the milliseconds of named phases; `take` returns and clears them."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._ms: dict[str, float] = defaultdict(float)
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Times the block as `name`; blocks of one name add up."""
        if self._is_cuda:
            make_event: Callable[..., torch.cuda.Event] = torch.cuda.Event
            start, end = make_event(enable_timing=True), make_event(enable_timing=True)
            start.record()
            yield
            end.record()
            self._events.append((name, start, end))
        else:
            start_s = time.perf_counter()
            yield
            self._ms[name] += (time.perf_counter() - start_s) * 1e3

    def take(self) -> dict[str, float]:
        """Milliseconds by phase since the last call. On a GPU, call it after the round's transfer to the host."""
        for name, start, end in self._events:
            end.synchronize()
            self._ms[name] += start.elapsed_time(end)
        taken, self._ms, self._events = self._ms, defaultdict(float), []
        return taken
