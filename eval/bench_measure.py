"""The benchmark's clock: every condition on every group of prompts, in alternation, in one process."""

import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from eval.bench_conditions import BackendFactory, Condition
from eval.config import BenchConfig
from specdec_runtime.request import Output, Request
from specdec_runtime.stats import Stats, total_stats

WARMUP_TOKENS = 8


@dataclass
class Measurement:
    """What one condition gave: per group of prompts the seconds, and per prompt the output, in prompt order.

    `seconds[g]` and `num_tokens[g]` belong to the g-th group, the same prompts for every condition.
    `peak_memory_mb`: of the GPU during this condition's calls, or of the whole process so far on a CPU.
    """

    condition: Condition
    seconds: list[float] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)
    peak_memory_mb: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        """All generated tokens over all seconds, prefill included."""
        return sum(self.num_tokens) / sum(self.seconds)

    @property
    def stats(self) -> Stats:
        """Sum over prompts."""
        return total_stats(output.stats for output in self.outputs)


def requests_of(
    prompts: Sequence[Sequence[int]],
    config: BenchConfig,
    temperature: float,
    *,
    max_new_tokens: int | None = None,
) -> list[Request]:
    """One request per prompt; prompt i samples with its own seed, the same one in every condition."""
    return [
        Request(
            prompt_token_ids=list(prompt),
            max_new_tokens=max_new_tokens or config.max_new_tokens,
            temperature=temperature,
            seed=config.seed + index,
            ignore_eos=config.ignore_eos,
        )
        for index, prompt in enumerate(prompts)
    ]


def measure(
    factory: BackendFactory,
    conditions: Sequence[Condition],
    prompts: Sequence[Sequence[int]],
    config: BenchConfig,
    *,
    deadline_s: float | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> list[Measurement]:
    """Runs conditions of one temperature and batch size on all prompts.

    The order rotates from group to group and runs backwards in every other one, so that drifts of the machine
    fall on all conditions alike. A group is run in full or not at all: with `deadline_s` (of
    `time.perf_counter`) fewer groups run.
    """
    temperature, batch = conditions[0].temperature, conditions[0].batch
    assert all((c.temperature, c.batch) == (temperature, batch) for c in conditions)
    results = {condition: Measurement(condition) for condition in conditions}
    _warm_up(factory, conditions, prompts, config)
    requests = requests_of(prompts, config, temperature)
    for index, start in enumerate(range(0, len(requests), batch)):
        if index > 0 and deadline_s is not None and time.perf_counter() > deadline_s:
            break
        group = requests[start : start + batch]
        shift = index % len(conditions)
        order = [*conditions[shift:], *conditions[:shift]]
        for condition in order if index % 2 == 0 else reversed(order):
            _run_group(factory, results[condition], group)
            if on_progress is not None:
                on_progress(1)
    return list(results.values())


def _run_group(factory: BackendFactory, result: Measurement, group: Sequence[Request]) -> None:
    backend, device = factory.backend_of(result.condition), factory.target.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    outputs = backend.generate(group)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    result.seconds.append(time.perf_counter() - start)
    result.num_tokens.append(sum(len(output.token_ids) for output in outputs))
    result.outputs.extend(outputs)
    result.peak_memory_mb = max(result.peak_memory_mb, _peak_memory_mb(device))


def _warm_up(
    factory: BackendFactory,
    conditions: Sequence[Condition],
    prompts: Sequence[Sequence[int]],
    config: BenchConfig,
) -> None:
    """A few tokens per condition before the clock counts: first calls allocate caches and choose kernels."""
    chosen = prompts[: config.num_warmup_prompts]
    for condition in conditions if chosen else ():
        num_tokens = min(WARMUP_TOKENS, config.max_new_tokens)
        requests = requests_of(chosen, config, condition.temperature, max_new_tokens=num_tokens)
        for start in range(0, len(requests), condition.batch):
            factory.backend_of(condition).generate(requests[start : start + condition.batch])


def _peak_memory_mb(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
