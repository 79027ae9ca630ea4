"""Per-prompt, per-position acceptance values, and the figures that are derived from them.

Shapes: P prompts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from eval.bootstrap import Interval, bootstrap_difference, bootstrap_ratio


@dataclass(frozen=True)
class AcceptanceTable:
    """Acceptance of one draft at one temperature for one sampler, position by position.

    `values[i]` is a_t over prompt i's response, shape [num response tokens]; everything else is derived from
    it. `rows_matched` says whether the rows had been sampled at this temperature (else all rows were used).
    """

    draft: str
    temperature: float
    sampler: str
    prompt_ids: list[str]
    sources: list[str]
    values: list[NDArray[np.float32]] = field(repr=False)
    rows_matched: bool = True
    num_skipped_rows: int = 0

    @property
    def sums(self) -> NDArray[np.float64]:
        """Accepted mass per prompt, [P]."""
        return np.array([v.sum(dtype=np.float64) for v in self.values])

    @property
    def counts(self) -> NDArray[np.float64]:
        """Measured positions per prompt, [P]."""
        return np.array([len(v) for v in self.values], dtype=np.float64)

    def rate(self, *, num_bootstrap: int = 1000, seed: int = 0) -> Interval:
        """`acceptance_rate` with its 95% interval over prompts."""
        return bootstrap_ratio(self.sums, self.counts, num_bootstrap=num_bootstrap, seed=seed)

    def by_source(self, *, num_bootstrap: int = 1000, seed: int = 0) -> dict[str, Interval]:
        """`acceptance_rate` within each source (domain), in alphabetical order."""
        sources = np.array(self.sources)
        return {
            source: bootstrap_ratio(
                self.sums[sources == source],
                self.counts[sources == source],
                num_bootstrap=num_bootstrap,
                seed=seed,
            )
            for source in sorted(set(self.sources))
        }

    def by_position(self, edges: Sequence[int] = (0, 1, 8, 32, 128)) -> list[dict[str, float]]:
        """{start, end, value, num_tokens} of response positions [start, end), without empty ranges."""
        result = []
        longest = max(map(len, self.values))
        for start, end in zip(edges, [*edges[1:], max(longest, edges[-1])], strict=True):
            inside = np.concatenate([v[start:end] for v in self.values])
            if len(inside):
                value = float(inside.mean(dtype=np.float64))
                result.append({"start": start, "end": end, "value": value, "num_tokens": len(inside)})
        return result


def paired_difference(
    a: AcceptanceTable, b: AcceptanceTable, *, num_bootstrap: int = 1000, seed: int = 0
) -> Interval:
    """acceptance_rate(a) - acceptance_rate(b) over the same prompts, resampled together."""
    if a.prompt_ids != b.prompt_ids:
        raise ValueError(f"{a.draft} and {b.draft} were measured on different prompts: no paired difference")
    return bootstrap_difference(a.sums, a.counts, b.sums, b.counts, num_bootstrap=num_bootstrap, seed=seed)
