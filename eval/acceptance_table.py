"""Per-prompt, per-position acceptance values, and the figures that are derived from them.

Shapes: P answers; a prompt may have several (`corpus.samples_per_prompt`), and whole prompts are resampled for intervals.
"""

import itertools
from collections.abc import Container, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from eval.bootstrap import Interval, bootstrap_difference, bootstrap_ratio


class Range(TypedDict):
    """Acceptance of the `num_tokens` positions of which some measure, `mean_measure` on average, is in [start, end)."""

    start: float
    end: float
    value: float
    mean_measure: float
    num_tokens: int


@dataclass(frozen=True, eq=False)
class AcceptanceTable:
    """Acceptance of one draft at one temperature for one sampler, position by position.

    `values[i]` is a_t over prompt i's response, shape [num response tokens]; everything else is derived from
    it. Alike: `given_token[i]` c_t, `entropies[i]` of the target in nats at temperature 1, `confidences[i]` the
    draft's largest probability at temperature 1. `was_cut[i]`: the response ended by a limit.
    `rows_matched` says whether the rows had been sampled at this temperature (else all rows were used).
    """

    draft: str
    temperature: float
    sampler: str
    prompt_ids: list[str]
    sources: list[str]
    values: list[NDArray[np.float32]] = field(repr=False)
    warper: str = "none"
    domains: list[str] = field(default_factory=list)
    given_token: list[NDArray[np.float32]] = field(default_factory=list, repr=False)
    entropies: list[NDArray[np.float32]] = field(default_factory=list, repr=False)
    confidences: list[NDArray[np.float32]] = field(default_factory=list, repr=False)
    was_cut: list[bool] = field(default_factory=list)
    rows_matched: bool = True
    num_skipped_rows: int = 0

    @property
    def sums(self) -> NDArray[np.float64]:
        """Accepted mass per answer, [P]."""
        return np.array([v.sum(dtype=np.float64) for v in self.values])

    @property
    def counts(self) -> NDArray[np.float64]:
        """Measured positions per answer, [P]."""
        return np.array([len(v) for v in self.values], dtype=np.float64)

    def rate(self, *, num_bootstrap: int = 1000, seed: int = 0) -> Interval:
        """`acceptance_rate` with its 95% interval over prompts."""
        return bootstrap_ratio(
            self.sums, self.counts, num_bootstrap=num_bootstrap, seed=seed, prompt_ids=self.prompt_ids
        )

    def restricted(self, prompt_ids: Container[str], num_tokens: int) -> "AcceptanceTable":
        """The first `num_tokens` positions of these prompts' responses, as if a limit had cut them there."""
        keep = [i for i, prompt_id in enumerate(self.prompt_ids) if prompt_id in prompt_ids]

        def head(arrays: list[NDArray[np.float32]]) -> list[NDArray[np.float32]]:
            return [arrays[i][:num_tokens] for i in keep] if arrays else []

        return replace(
            self,
            prompt_ids=[self.prompt_ids[i] for i in keep],
            sources=[self.sources[i] for i in keep],
            domains=[self.domains[i] for i in keep] if self.domains else [],
            values=head(self.values),
            given_token=head(self.given_token),
            entropies=head(self.entropies),
            confidences=head(self.confidences),
            was_cut=[self.was_cut[i] or len(self.values[i]) > num_tokens for i in keep]
            if self.was_cut
            else [],
        )

    @property
    def key(self) -> dict[str, Any]:
        """draft, temperature, sampler and warper, as rows of a report have them."""
        names = ("draft", "temperature", "sampler", "warper")
        return {name: getattr(self, name) for name in names}

    def by_domain(self, *, num_bootstrap: int = 1000, seed: int = 0) -> dict[str, Interval]:
        """`acceptance_rate` within each domain (or source, where no domains are known), in alphabetical order."""
        sums, counts = self.sums, self.counts
        places: dict[str, list[int]] = {}
        for place, name in enumerate(self.domains or self.sources):
            places.setdefault(name, []).append(place)
        return {
            name: bootstrap_ratio(
                sums[at], counts[at], num_bootstrap=num_bootstrap, seed=seed, prompt_ids=[self.prompt_ids[i] for i in at]
            )
            for name, at in sorted(places.items())
        }

    def by_position(self, edges: Sequence[int] = (0, 1, 8, 32, 128)) -> list[Range]:
        """Acceptance at response positions [start, end), without empty ranges."""
        longest = max(map(len, self.values))
        limits = [*edges, max(longest, edges[-1] + 1)]
        return self._by_range([np.arange(len(v)) for v in self.values], limits)

    def by_entropy(self, edges: Sequence[float] = (0, 0.05, 0.25, 0.5, 1, 2, 4)) -> list[Range]:
        """Acceptance where the target's entropy lies in [start, end) nats, without empty ranges."""
        largest = max(float(e.max()) for e in self.entropies)
        return self._by_range(self.entropies, [*edges, max(largest, edges[-1]) + 1e-6])

    def by_confidence(self, num_ranges: int = 10) -> list[Range]:
        """Acceptance where the draft's largest probability lies in [start, end): its calibration."""
        edges = [i / num_ranges for i in range(num_ranges)]
        return self._by_range(self.confidences, [*edges, 1.0 + 1e-6])

    def _by_range(self, measures: Sequence[NDArray[Any]], limits: Sequence[float]) -> list[Range]:
        measure_N = np.concatenate(measures).astype(np.float64)
        values_N = np.concatenate(self.values).astype(np.float64)
        result: list[Range] = []
        for start, end in itertools.pairwise(limits):
            inside_N = (measure_N >= start) & (measure_N < end)
            if num_tokens := int(inside_N.sum()):
                result.append(
                    {
                        "start": float(start),
                        "end": float(end),
                        "value": float(values_N[inside_N].mean()),
                        "mean_measure": float(measure_N[inside_N].mean()),
                        "num_tokens": num_tokens,
                    }
                )
        return result


def paired_difference(
    a: AcceptanceTable, b: AcceptanceTable, *, num_bootstrap: int = 1000, seed: int = 0
) -> Interval:
    """acceptance_rate(a) - acceptance_rate(b) over the same prompts, resampled together."""
    if a.prompt_ids != b.prompt_ids:
        raise ValueError(f"{a.draft} and {b.draft} were measured on different prompts: no paired difference")
    return bootstrap_difference(
        a.sums, a.counts, b.sums, b.counts, num_bootstrap=num_bootstrap, seed=seed, prompt_ids=a.prompt_ids
    )
