"""Decode steps as CUDA graphs: one replay in place of some thousand kernel launches.

A graph is captured per shape (rows, width, attended length, logits), and the batch is padded to all slots, so that few
shapes occur. Keys and values are written through the cache's own tensors, which never move.
"""

import logging
from collections.abc import Callable
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

logger = logging.getLogger("specdec_runtime")

NUM_WARMUP_RUNS = 2


class Computed(NamedTuple):
    """Of a forward: logits, None where the head was not run, and the last hidden states, None where they are not wanted."""

    logits: Optional[Tensor]
    hidden: Optional[Tensor]


Compute = Callable[..., Computed]  # of tensors, whose contents may be others each time


class Captured(NamedTuple):
    """A graph with its static inputs and output."""

    graph: torch.cuda.CUDAGraph
    inputs: tuple[Tensor, ...]
    results: Computed


class GraphedSteps:
    """Captures a step at its first use and replays it afterwards; falls back to eager when a capture fails."""

    def __init__(self) -> None:
        self._captured: dict[tuple[int, ...], Captured] = {}
        self._pool: Any = None
        self.is_usable = True

    def clear(self) -> None:
        """Forgets all graphs: their cache tensors are gone."""
        self._captured.clear()

    def run(self, key: tuple[int, ...], compute: Compute, *inputs: Tensor) -> Computed:
        """Results of `compute(*inputs)`; they are overwritten by the next step of the same key and shapes."""
        if not self.is_usable:
            return compute(*inputs)
        key = (*key, *(size for x in inputs for size in x.shape))
        if key not in self._captured:
            try:
                self._captured[key] = self._capture(compute, *inputs)
            except RuntimeError as error:
                self.is_usable = False
                logger.warning("CUDA graph capture failed, decoding goes on without graphs: %s", error)
                return compute(*inputs)
        step = self._captured[key]
        for static, given in zip(step.inputs, inputs, strict=True):
            static.copy_(given)
        step.graph.replay()
        return step.results

    def _capture(self, compute: Compute, *given: Tensor) -> Captured:
        inputs = tuple(x.clone() for x in given)
        make_stream: Callable[[], torch.cuda.Stream] = torch.cuda.Stream
        side = make_stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(NUM_WARMUP_RUNS):  # writes the same keys and values as the step itself
                compute(*inputs)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            results = compute(*inputs)
        self._pool = self._pool or graph.pool()
        return Captured(graph, inputs, results)
