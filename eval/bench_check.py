"""Whether the benchmark's greedy outputs are those of plain decoding, condition by condition."""

from collections.abc import Sequence
from typing import Any

import torch

from eval.bench_conditions import BackendFactory, Condition
from eval.bench_measure import Measurement, requests_of
from eval.config import BenchConfig
from eval.lossless import Mismatch, find_mismatches

Outputs = list[list[int]]
#: Plain decoding that greedy outputs are held against in fp32.
REFERENCES = ("native", "hf_generate")


class TokenChecker:
    """Compares the tokens of one setting's conditions with plain decoding's."""

    def __init__(
        self,
        factory: BackendFactory,
        prompts: Sequence[Sequence[int]],
        config: BenchConfig,
        measurements: Sequence[Measurement],
    ) -> None:
        self._factory, self._prompts, self._config = factory, prompts, config
        self._plain = {m.condition.backend: m for m in measurements if m.condition.is_plain}
        self._at_width: dict[int, Outputs] = {}

    def check(self, measurement: Measurement) -> dict[str, Any]:
        """`lossless`, and at temperature 0 how many outputs are the same and why others are not.

        At temperature 0 in fp32, lossless means that every token is that of native plain decoding and that of
        `hf_generate`, at the same batch size. In 16-bit formats, where kernels round by width, it means for
        the native engine that the tokens are those of plain decoding at the same width
        (`num_identical_same_width` of `num_checked`); in batches, with gamma=auto, for n-grams and for other backends,
        whose widths are not ours to set, and for trees, whose keys lie in another order, a difference at a near tie is
        allowed. At temperature > 0 it says that the acceptance rule is exact.

        With a synthetic acceptance rule no token is compared: they mean nothing.
        """
        condition = measurement.condition
        claims_lossless = all(output.lossless for output in measurement.outputs)
        if condition.temperature > 0 or self._factory.is_synthetic(condition):
            return {"lossless": claims_lossless}
        mismatches = self._mismatches(measurement, self._main_reference())
        result: dict[str, Any] = {
            "num_identical": len(measurement.outputs) - len(mismatches),
            "mismatches": [mismatch.as_dict() for mismatch in mismatches],
        }
        must_be_exact = self._factory.target.dtype == torch.float32
        if must_be_exact:
            is_same = self._is_exact(measurement, result)
        else:
            is_same = condition.is_plain or all(mismatch.is_near_tie for mismatch in mismatches)
        if condition.has_one_width:
            same_width, differing = self._same_width(measurement)
            result |= same_width
            if must_be_exact:
                is_same = is_same and not differing
            else:
                may_round = condition.batch > 1 or condition.tree is not None
                is_same = all(may_round and mismatch.is_near_tie for mismatch in differing)
        return {**result, "lossless": claims_lossless and is_same}

    def _is_exact(self, measurement: Measurement, result: dict[str, Any]) -> bool:
        """Whether every output equals that of each reference; adds `num_identical_hf_generate`."""
        num_identical = {
            name: len(measurement.outputs) - len(self._mismatches(measurement, reference))
            for name, reference in self._plain.items()
            if name in REFERENCES
        }
        if "hf_generate" in num_identical:
            result["num_identical_hf_generate"] = num_identical["hf_generate"]
        return all(num == len(measurement.outputs) for num in num_identical.values())

    def _same_width(self, measurement: Measurement) -> tuple[dict[str, int], list[Mismatch]]:
        """The comparison with plain decoding at the verification's width: counts, and what differs."""
        plain = _token_ids(self._main_reference())
        same_width = self._plain_at_width(measurement.condition)
        num_checked = len(same_width)
        outputs = _token_ids(measurement)[:num_checked]
        differing = find_mismatches(self._factory.target, self._prompts, same_width, outputs)
        counts = {
            "num_checked": num_checked,
            "num_identical_same_width": num_checked - len(differing),
            # How much plain decoding itself changes with the width: what the mismatches are to
            # be seen against.
            "num_plain_identical_across_widths": sum(a == b for a, b in zip(plain, same_width, strict=False)),
        }
        return counts, differing

    def _plain_at_width(self, condition: Condition) -> Outputs:
        """Plain greedy outputs of the first prompts, by forwards as wide as this verification."""
        width = condition.width
        if width not in self._at_width:
            num_prompts = min(self._config.num_check_prompts, len(self._main_reference().outputs))
            requests = requests_of(self._prompts[:num_prompts], self._config, 0.0)
            backend, batch = self._factory.plain_at_width(width, condition.batch), condition.batch
            self._at_width[width] = [
                output.token_ids
                for start in range(0, num_prompts, batch)
                for output in backend.generate(requests[start : start + batch])
            ]
        return self._at_width[width]

    def _main_reference(self) -> Measurement:
        return self._plain.get("native") or next(iter(self._plain.values()))

    def _mismatches(self, measurement: Measurement, reference: Measurement) -> list[Mismatch]:
        return find_mismatches(
            self._factory.target, self._prompts, _token_ids(reference), _token_ids(measurement)
        )


def _token_ids(measurement: Measurement) -> Outputs:
    return [output.token_ids for output in measurement.outputs]
