"""What the rows of a batch have in common on the device: sampling parameters, noise, counts."""

from collections.abc import Sequence
from typing import Optional

import numpy as np
import torch
from torch import Tensor

from specdec_runtime.noise import uniforms
from specdec_runtime.sampling import BatchSampling
from specdec_runtime.scheduler import Row


class Batch:
    """The active rows, in slot order; made anew when a row enters or leaves."""

    def __init__(self, rows: Sequence[Row], *, vocab_size: int, device: torch.device) -> None:
        self.rows, self.device = list(rows), device
        self.sampling = BatchSampling(
            [row.request for row in rows],
            [row.token_ids for row in rows],
            [sorted(row.stop_ids) for row in rows],
            vocab_size=vocab_size,
            device=device,
        )

    def column(self, values: Sequence[int]) -> Tensor:
        """One number per row, [B]."""
        return torch.tensor(values, device=self.device)

    def num_generated(self) -> Tensor:
        """Committed output tokens per row, [B]."""
        return self.column([row.num_generated for row in self.rows])

    def noise(self, num: int, *, num_lanes: int = 1) -> Optional[Tensor]:
        """[purpose, B, num] uniform numbers for the next `num` output positions; None when all is at temperature 0."""
        return None if self.sampling.all_greedy else self.uniforms(num, num_lanes=num_lanes)

    def uniforms(self, num: int, *, num_lanes: int = 1) -> Tensor:
        """The same, whatever the temperatures."""
        seeds = np.array([row.seed for row in self.rows], dtype=np.uint64)
        positions = np.array([row.num_generated for row in self.rows], dtype=np.int64)
        return torch.from_numpy(uniforms(seeds, positions, num, num_lanes=num_lanes)).to(self.device)
