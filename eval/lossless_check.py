"""The whole comparison of greedy outputs: speculative against plain decoding and `generate`, by drafter and batch size.

What a difference is worth is seen beside how much plain decoding differs from itself: at other widths, in other batches.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from eval.bench_conditions import NO_DRAFT, BackendFactory, Condition, conditions_at, tree_name
from eval.bench_measure import requests_of
from eval.config import BenchConfig
from eval.lossless import Mismatch, find_mismatches
from specdec_runtime.backends.base import Backend

Outputs = list[list[int]]


@dataclass
class Comparison:
    """One run against another. `kind`: `speculative` (must be the same) or `plain` (how far plain decoding agrees with itself).

    `draft`, `gamma` and `tree` are as in the benchmark. `must_be_identical`: every token; elsewhere a difference at a near tie is
    the rounding of another shape of forward.
    """

    kind: str
    what: str
    against: str
    batch: int
    draft: str
    gamma: int
    tree: str | tuple[int, ...] | None
    num_outputs: int
    must_be_identical: bool
    mismatches: list[Mismatch]

    @property
    def num_identical(self) -> int:
        """Outputs that are the same to the last token."""
        return self.num_outputs - len(self.mismatches)

    @property
    def is_lossless(self) -> bool:
        """Whether nothing speaks against it."""
        if self.must_be_identical:
            return not self.mismatches
        return all(mismatch.is_near_tie for mismatch in self.mismatches)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "num_identical": self.num_identical, "is_lossless": self.is_lossless}


class LosslessCheck:
    """Greedy outputs of some drafts on the same prompts, each run made once.

    Args:
        factory: makes the backends. prompts: as token ids. config: `gammas`, `trees`, `ngram_gammas`, `batch_sizes`,
            `max_new_tokens`, `backends` (`hf_generate` among them is compared with too).
        drafts: by name.
        on_run: told of each run before it starts.
    """

    def __init__(
        self,
        factory: BackendFactory,
        prompts: Sequence[Sequence[int]],
        config: BenchConfig,
        *,
        drafts: Sequence[str] = ("distilled",),
        on_run: Callable[[str], None] = print,
    ) -> None:
        self._factory, self._prompts, self._config, self._drafts = factory, prompts, config, drafts
        self._on_run = on_run
        self._is_exact_dtype = factory.target.dtype == torch.float32
        self._outputs: dict[str, Outputs] = {}

    def comparisons(self) -> Iterator[Comparison]:
        """One after the other, as their runs are done."""
        first = min(self._config.batch_sizes)
        for batch in self._config.batch_sizes:
            plain = self._plain(batch)
            if batch != first:
                yield self._compare(
                    "plain",
                    f"plain, batch {batch}",
                    f"plain, batch {first}",
                    plain,
                    self._plain(first),
                    batch,
                )
            if "hf_generate" in self._config.backends:
                hf = self._run(
                    f"hf_generate, batch {batch}", Condition("hf_generate", NO_DRAFT, 0, 0.0, batch)
                )
                yield self._compare("plain", f"plain, batch {batch}", "hf_generate", plain, hf, batch)
            for condition in self._speculative(batch):
                yield from self._of_condition(condition)

    def _speculative(self, batch: int) -> list[Condition]:
        """Chains and trees of the drafts that were chosen, and n-grams where they are asked for."""
        drafts = {name: self._factory.drafts[name] for name in self._drafts}
        found = conditions_at(
            replace(self._config, auto_gamma=False, backends=["native"]), drafts, temperature=0.0, batch=batch
        )
        return [condition for condition in found if not condition.is_plain]

    def _of_condition(self, condition: Condition) -> Iterator[Comparison]:
        name, batch = _name_of(condition), condition.batch
        outputs = self._run(name, condition)
        plain, width = self._plain(batch), condition.width
        if not self._is_exact_dtype and condition.has_one_width:
            wide_name = f"plain at width {width}, batch {batch}"
            is_new = wide_name not in self._outputs
            if is_new:
                self._generate(wide_name, self._factory.plain_at_width(width, batch))
            wide = self._outputs[wide_name]
            against = f"plain at width {width}"
            yield self._compare("speculative", name, against, outputs, wide, batch, condition)
            if is_new:
                yield self._compare("plain", wide_name, "plain at width 1", wide, plain, batch, condition)
        yield self._compare("speculative", name, "plain at width 1", outputs, plain, batch, condition)
        if "hf_generate" in self._config.backends:
            hf = self._outputs[f"hf_generate, batch {batch}"]
            yield self._compare("speculative", name, "hf_generate", outputs, hf, batch, condition)

    def _compare(
        self,
        kind: str,
        what: str,
        against: str,
        outputs: Outputs,
        expected: Outputs,
        batch: int,
        condition: Condition | None = None,
    ) -> Comparison:
        # In 16 bits, only runs with the same shapes of forwards must round alike: one row, at the same width, and a chain, for
        # in a tree the keys lie in another order.
        is_at_width = against.startswith("plain at width") and against != "plain at width 1"
        has_same_shapes = is_at_width and batch == 1 and condition is not None and condition.tree is None
        return Comparison(
            kind=kind,
            what=what,
            against=against,
            batch=batch,
            draft=NO_DRAFT if condition is None else condition.draft,
            gamma=0 if condition is None else condition.gamma,
            tree=None if condition is None else condition.tree,
            num_outputs=len(outputs),
            must_be_identical=self._is_exact_dtype or has_same_shapes,
            mismatches=find_mismatches(self._factory.target, self._prompts, expected, outputs),
        )

    def _plain(self, batch: int) -> Outputs:
        return self._run(f"plain, batch {batch}", Condition("native", NO_DRAFT, 0, 0.0, batch))

    def _run(self, name: str, condition: Condition) -> Outputs:
        return (
            self._outputs[name]
            if name in self._outputs
            else self._generate(name, self._factory.backend_of(condition))
        )

    def _generate(self, name: str, backend: Backend) -> Outputs:
        self._on_run(name)
        requests = requests_of(self._prompts, self._config, 0.0)
        self._outputs[name] = [output.token_ids for output in backend.generate(requests)]
        return self._outputs[name]


def _name_of(condition: Condition) -> str:
    """As in "gamma 4, batch 8" of the run's own draft, or "medusa, tree 3x2x1, batch 8"."""
    how = f"gamma {condition.gamma}" if condition.tree is None else f"tree {tree_name(condition.tree)}"
    name = f"{how}, batch {condition.batch}"
    return name if condition.draft == "distilled" else f"{condition.draft}, {name}"
