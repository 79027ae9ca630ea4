"""A short look at a pair by the clock: what its steps cost, how much is accepted, and what follows for the speed.

The native runtime decodes answers with the draft, and counts per position of a round what the target accepts. With the
measured step times that gives tau and the predicted speedup of each gamma (`eval/theory.py`), with an interval over prompts.

Shapes: P prompts, R resamples.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from eval.bootstrap import Interval, bootstrap, bootstrap_ratio
from eval.theory import StepTimes, break_even_acceptance
from eval.timing import measure_step_times
from specdec_runtime import DecoderConfig, Output, Request, SpeculativeDecoder

#: Of the time that the probe has, this much goes to the step times; the rest to decoding.
TIMING_SHARE = 0.3
WAVE_ROWS = 4


@dataclass(frozen=True)
class ProbeSettings:
    """`seconds` is for measuring; loading the models comes on top."""

    seconds: float = 30.0
    max_gamma: int = 4
    temperatures: tuple[float, ...] = (0.0, 1.0)
    context_tokens: int = 128
    max_new_tokens: int = 48
    seed: int = 0

    def within(self, context: int | None) -> "ProbeSettings":
        """The same for models that read `context` positions: steps are timed, and answers end, inside it.

        Raises:
            ValueError: the context is too short to measure anything.
        """
        if context is None:
            return self
        context_tokens = min(self.context_tokens, context - self.max_gamma - 2)
        if context_tokens < 2:
            raise ValueError(
                f"a context of {context} positions is too short for --max-gamma {self.max_gamma}"
            )
        return replace(
            self, context_tokens=context_tokens, max_new_tokens=min(self.max_new_tokens, max(context // 3, 1))
        )


@dataclass(frozen=True)
class GammaOutlook:
    """One gamma at one temperature: tokens per target forward, and the predicted speed over plain decoding."""

    gamma: int
    tau: Interval
    speedup: Interval


@dataclass(frozen=True)
class TemperatureProbe:
    """What was counted at one temperature. `acceptance`: accepted over judged proposals (all earlier ones accepted)."""

    temperature: float
    num_prompts: int
    num_tokens: int
    acceptance: Interval
    outlooks: tuple[GammaOutlook, ...]

    @property
    def best(self) -> GammaOutlook:
        """The gamma with the highest predicted speedup."""
        return max(self.outlooks, key=lambda outlook: outlook.speedup.value)


@dataclass(frozen=True)
class Probe:
    """Everything that was measured, in milliseconds and counts. `break_even` is None where no acceptance would do."""

    times: StepTimes
    break_even: dict[int, float | None]
    by_temperature: tuple[TemperatureProbe, ...]


def time_steps(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    settings: ProbeSettings,
    *,
    draft_vocab_ids: Tensor | None = None,
) -> StepTimes:
    """T(1..max_gamma+1), the draft's step and a round's overhead, at batch 1.

    Raises:
        ValueError: the runtime cannot use one of the models.
    """
    return measure_step_times(
        target,
        draft,
        max_gamma=settings.max_gamma,
        context_tokens=settings.context_tokens,
        draft_vocab_ids=draft_vocab_ids,
        max_seconds=settings.seconds * TIMING_SHARE,
    )


def run_probe(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    times: StepTimes,
    settings: ProbeSettings,
    *,
    deadline_s: float,
    draft_vocab_ids: Tensor | None = None,
) -> Probe:
    """Decode in small waves until the time is over; every temperature gets one wave at least.

    Args:
        prompts: token ids of P prompts; a wave takes the next few of them.
        deadline_s: on the clock of `time.perf_counter`.

    Raises:
        ValueError: nothing was proposed.
    """
    config = DecoderConfig(
        num_speculative_tokens=settings.max_gamma,
        max_batch_size=WAVE_ROWS,
        min_conditional_acceptance=0.0,  # a guard that lowers gamma would hide the later positions
    )
    decoder = SpeculativeDecoder(target, draft, config, draft_vocab_ids=draft_vocab_ids)
    outputs: dict[float, list[Output]] = {temperature: [] for temperature in settings.temperatures}
    longest_s = 0.0
    for number, (temperature, requests) in enumerate(_waves(prompts, settings)):
        start_s = time.perf_counter()
        if number >= len(settings.temperatures) and start_s + longest_s > deadline_s:
            break
        outputs[temperature] += decoder.generate(requests)
        longest_s = max(longest_s, time.perf_counter() - start_s)
    return Probe(
        times,
        {gamma: break_even_acceptance(gamma, times) for gamma in range(1, settings.max_gamma + 1)},
        tuple(_summarise(temperature, found, times) for temperature, found in outputs.items()),
    )


def _waves(
    prompts: Sequence[Sequence[int]], settings: ProbeSettings
) -> Iterator[tuple[float, list[Request]]]:
    """Temperatures take turns on the same prompts; each prompt is asked once per temperature."""
    for first in range(0, len(prompts), WAVE_ROWS):
        for temperature in settings.temperatures:
            requests = [
                Request(
                    ids,
                    max_new_tokens=settings.max_new_tokens,
                    temperature=temperature,
                    seed=settings.seed + number,
                )
                for number, ids in enumerate(prompts[first : first + WAVE_ROWS], start=first)
            ]
            yield temperature, requests


def _summarise(temperature: float, outputs: list[Output], times: StepTimes) -> TemperatureProbe:
    gammas = range(1, times.max_gamma + 1)
    accepted_GP, judged_GP = (
        np.array([_padded(getattr(output.stats, name), times.max_gamma) for output in outputs]).T
        for name in ("accepted_per_position", "judged_per_position")
    )
    if not judged_GP[0].sum():
        reasons = sorted({output.stats.not_speculating or "answers of one token" for output in outputs})
        raise ValueError(f"nothing was proposed at temperature {temperature:g}: {', '.join(reasons)}")
    return TemperatureProbe(
        temperature,
        len(outputs),
        sum(len(output.token_ids) for output in outputs),
        bootstrap_ratio(accepted_GP.sum(axis=0), judged_GP.sum(axis=0)),
        tuple(_outlook(gamma, accepted_GP, judged_GP, times) for gamma in gammas),
    )


def _padded(counts: list[int], length: int) -> list[int]:
    return counts[:length] + [0] * (length - len(counts))


def _outlook(
    gamma: int, accepted_GP: NDArray[np.int64], judged_GP: NDArray[np.int64], times: StepTimes
) -> GammaOutlook:
    """tau and speedup of one gamma, from the conditional acceptance of its positions over resampled prompts."""
    ms_per_round = gamma * times.mean_draft_ms(gamma) + times.verify_ms(gamma) + times.overhead_ms

    def tau(*sums_R: NDArray[np.float64]) -> NDArray[np.float64]:
        # A position that was never reached has nothing accepted, and adds nothing.
        rates = [sums_R[i] / np.maximum(sums_R[gamma + i], 1) for i in range(gamma)]
        tokens_R: NDArray[np.float64] = 1.0 + np.cumprod(np.stack(rates), axis=0).sum(axis=0)
        return tokens_R

    columns = [*accepted_GP[:gamma], *judged_GP[:gamma]]
    tokens = bootstrap(columns, tau)
    factor = times.target_ms[0] / ms_per_round
    speedup = Interval(tokens.value * factor, tokens.low * factor, tokens.high * factor)
    return GammaOutlook(gamma, tokens, speedup)
