"""What a candidate of a search is ranked by: the speedup that its measured acceptance and step times predict."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.config import EvalConfig
from eval.theory import StepTimes, expected_tokens_from_positions
from pipeline.report import read_result
from pipeline.shortlist import times_of_chosen_head


@dataclass(frozen=True)
class Score:
    """A candidate after training for some minutes. `speedups` by gamma; `tau` and `speedup` are those of `gamma`, the best one."""

    acceptance_rate: float
    gamma: int
    tau: float
    speedup: float
    speedups: dict[int, float]
    draft_ms: float
    cost_ratio: float
    num_steps: int

    @property
    def score(self) -> float:
        """What candidates are ranked by."""
        return self.speedup


def with_common_target(times: Mapping[str, StepTimes]) -> dict[str, StepTimes]:
    """Each candidate's own draft times beside the medians over all of what does not depend on the draft.

    The target was timed once for each candidate: a slow moment in one of them would otherwise decide the ranking.
    """
    widths = range(min(len(one.target_ms) for one in times.values()))
    target_ms = tuple(statistics.median(one.target_ms[width] for one in times.values()) for width in widths)
    overhead_ms = statistics.median(one.overhead_ms for one in times.values())
    return {
        name: StepTimes(one.draft_ms, target_ms, overhead_ms, one.draft_first_ms) for name, one in times.items()
    }


def score_candidate(
    eval_folder: Path, distill_folder: Path, times: StepTimes, *, temperature: float, sampler: str, max_gamma: int
) -> Score:
    """The candidate's score from the rounds that the eval stage worked out for each gamma.

    Raises:
        ValueError: temperature, sampler or gamma were not measured.
    """
    result = read_result(eval_folder, "acceptance.json")
    times = times_of_chosen_head(times, distill_folder)
    rounds = _entry(result.get("rounds", []), temperature, sampler)
    rate = _entry(result["acceptance_rate"], temperature, sampler)
    speedups: dict[int, float] = {}
    taus: dict[int, float] = {}
    for gamma in range(1, min(max_gamma, times.max_gamma) + 1):
        taus[gamma] = expected_tokens_from_positions(rounds["cumulative_acceptance"][str(gamma)])
        speedups[gamma] = times.speedup(tau=taus[gamma], gamma=gamma)
    best = max(speedups, key=lambda gamma: speedups[gamma])
    return Score(
        acceptance_rate=rate["value"],
        gamma=best,
        tau=taus[best],
        speedup=speedups[best],
        speedups=speedups,
        draft_ms=times.draft_ms,
        cost_ratio=times.cost_ratio,
        num_steps=int(read_result(distill_folder, "train.json")["num_steps"]),
    )


def require_measured(settings: EvalConfig, *, temperature: float, sampler: str) -> None:
    """Raise ValueError unless the eval stage will measure this temperature and sampler."""
    if temperature not in settings.temperatures or sampler not in settings.samplers:
        raise _not_measured(temperature, sampler)


def _not_measured(temperature: float, sampler: str) -> ValueError:
    return ValueError(
        f"search: acceptance at temperature {temperature:g} with sampler {sampler} is not measured; set eval.temperatures "
        "and eval.samplers, or search.temperature and search.sampler"
    )


def _entry(entries: Sequence[Mapping[str, Any]], temperature: float, sampler: str) -> Mapping[str, Any]:
    for entry in entries:
        if entry["draft"] == "distilled" and entry["temperature"] == temperature and entry["sampler"] == sampler:
            return entry
    raise _not_measured(temperature, sampler)


def pareto_front(scores: Mapping[str, Score]) -> list[str]:
    """Candidates that no other one beats in acceptance without costing more, by rising cost."""
    front: list[str] = []
    highest = -1.0
    for name in sorted(scores, key=lambda name: (scores[name].draft_ms, -scores[name].acceptance_rate)):
        if scores[name].acceptance_rate > highest:
            front.append(name)
            highest = scores[name].acceptance_rate
    return front
