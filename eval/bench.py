"""The benchmark: plain decoding against the drafts, on the same prompts, in alternation inside one process.

A speedup is stated against the strongest plain decoding of the same run, temperature and batch size. At
temperature 0 the tokens are checked too (see `eval.lossless`).
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedModel

from eval.bench_conditions import BackendFactory, Condition, conditions_at
from eval.bench_measure import Measurement, measure, requests_of
from eval.bench_rows import Row, bench_row, strongest_baseline
from eval.config import BenchConfig
from eval.lossless import find_mismatches
from eval.teacher_forcing import Draft
from specdec_runtime.config import DecoderConfig

Outputs = list[list[int]]


@dataclass
class BenchResult:
    """`rows`: one per condition, JSON-able, with the keys of the report and more. `measurements`: what they
    came from.
    """

    rows: list[Row] = field(default_factory=list)
    measurements: list[Measurement] = field(default_factory=list)


def run_bench(
    target: PreTrainedModel,
    drafts: Mapping[str, Draft],
    prompts: Sequence[Sequence[int]],
    config: BenchConfig,
    *,
    runtime: DecoderConfig | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> BenchResult:
    """Runs all conditions on the first `config.num_prompts` prompts.

    Args:
        drafts: by name, `undistilled` and `distilled` for instance; empty compares the baselines alone.
        runtime: sampler and the like; gamma, batch size and width are set by the conditions.
        on_progress: called with (groups done, groups in all) after each group of prompts.

    Raises:
        ValueError: no prompts, a draft that is called `none`, or what a backend refuses.
    """
    prompts = list(prompts)[: config.num_prompts]
    if not prompts:
        raise ValueError("bench: no prompts were given")
    if "none" in drafts:
        raise ValueError("bench: a draft cannot be called 'none', which stands for plain decoding")
    factory = BackendFactory(target, drafts, runtime or DecoderConfig())
    settings = [
        conditions_at(config, list(drafts), temperature=temperature, batch=batch)
        for temperature in dict.fromkeys(config.temperatures)
        for batch in dict.fromkeys(config.batch_sizes)
    ]
    total = sum(len(conditions) * -(-len(prompts) // conditions[0].batch) for conditions in settings)
    num_done = 0

    def advance(num_groups: int) -> None:
        nonlocal num_done
        num_done += num_groups
        if on_progress is not None:
            on_progress(num_done, total)

    started, result = time.perf_counter(), BenchResult()
    for index, conditions in enumerate(settings):
        deadline_s = None
        if config.max_minutes is not None:
            # Every setting gets its share; what an earlier one left over, the later ones may use.
            deadline_s = started + 60 * config.max_minutes * (index + 1) / len(settings)
        measurements = measure(
            factory, conditions, prompts, config, deadline_s=deadline_s, on_progress=advance
        )
        baseline = strongest_baseline(measurements)
        checker = _TokenChecker(factory, prompts, config, measurements)
        for measurement in measurements:
            row = bench_row(measurement, baseline, num_bootstrap=config.num_bootstrap, seed=config.seed)
            result.rows.append({**row, **checker.check(measurement)})
        result.measurements.extend(measurements)
    return result


class _TokenChecker:
    """Compares the tokens of one setting's conditions with plain decoding's."""

    def __init__(
        self,
        factory: BackendFactory,
        prompts: Sequence[Sequence[int]],
        config: BenchConfig,
        measurements: Sequence[Measurement],
    ) -> None:
        self._factory, self._prompts, self._config = factory, prompts, config
        plain = [m for m in measurements if m.condition.is_plain]
        self._plain = next((m for m in plain if m.condition.backend == "native"), plain[0])
        self._at_width: dict[int, Outputs] = {}

    def check(self, measurement: Measurement) -> dict[str, Any]:
        """`lossless`, and at temperature 0 how many outputs are the same and why others are not.

        lossless at temperature 0: for the native engine, the tokens are those of plain decoding at the same
        width (`num_identical_same_width` of `num_checked`); in batches, and for other backends, whose widths
        are not ours to set, a difference at a near tie is allowed. At temperature > 0 it says that the
        acceptance rule is exact.
        """
        condition = measurement.condition
        claims_lossless = all(output.lossless for output in measurement.outputs)
        if condition.temperature > 0:
            return {"lossless": claims_lossless}
        outputs = [output.token_ids for output in measurement.outputs]
        plain = [output.token_ids for output in self._plain.outputs]
        mismatches = find_mismatches(self._factory.target, self._prompts, plain, outputs)
        result: dict[str, Any] = {
            "num_identical": len(outputs) - len(mismatches),
            "mismatches": [mismatch.as_dict() for mismatch in mismatches],
        }
        if condition.is_plain or condition.backend != "native":
            only_ties = all(mismatch.is_near_tie for mismatch in mismatches)
            return {**result, "lossless": claims_lossless and (condition.is_plain or only_ties)}
        same_width = self._plain_at_width(condition)
        num_checked = len(same_width)
        differing = find_mismatches(self._factory.target, self._prompts, same_width, outputs[:num_checked])
        is_tie_allowed = condition.batch > 1
        is_same = all(is_tie_allowed and mismatch.is_near_tie for mismatch in differing)
        return {
            **result,
            "lossless": claims_lossless and is_same,
            "num_checked": num_checked,
            "num_identical_same_width": num_checked - len(differing),
            # How much plain decoding itself changes with the width: what the mismatches above are to be seen
            # against.
            "num_plain_identical_across_widths": sum(a == b for a, b in zip(plain, same_width, strict=False)),
        }

    def _plain_at_width(self, condition: Condition) -> Outputs:
        """Plain greedy outputs of the first prompts, with forwards as wide as this condition's verification."""
        width = condition.gamma + 1
        if width not in self._at_width:
            num_prompts = min(self._config.num_check_prompts, len(self._plain.outputs))
            requests = requests_of(self._prompts[:num_prompts], self._config, 0.0)
            backend, batch = self._factory.plain_at_width(width, condition.batch), condition.batch
            self._at_width[width] = [
                output.token_ids
                for start in range(0, num_prompts, batch)
                for output in backend.generate(requests[start : start + batch])
            ]
        return self._at_width[width]
