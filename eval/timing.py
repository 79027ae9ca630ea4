"""Step times on this device: what a target forward of each width and a draft step cost, before any training.

Shapes suffice, so random weights will do: times do not depend on the values. The forwards are the runtime's
own (static slots, its attention, its head), so that the figures are those of serving.
"""

import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from eval.measured_runtime import fixed_chains
from eval.theory import StepTimes
from specdec_runtime import DecoderConfig, Request, SpeculativeDecoder
from specdec_runtime.drafter import with_trimmed_head
from specdec_runtime.forward import ModelRunner, StepOptions
from specdec_runtime.medusa_heads import MedusaHeads


def measure_step_times(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    *,
    max_gamma: int,
    context_tokens: int = 256,
    batch_size: int = 1,
    num_repeats: int = 15,
    draft_vocab_ids: Tensor | None = None,
    max_seconds: float = 60.0,
    runtime: DecoderConfig | None = None,
) -> StepTimes:
    """Medians of T(1..max_gamma+1), of the draft's steps and of a round's overhead; arguments as of `measure_head_times`."""
    [times] = measure_head_times(
        target,
        draft,
        [draft_vocab_ids],
        max_gamma=max_gamma,
        context_tokens=context_tokens,
        batch_size=batch_size,
        num_repeats=num_repeats,
        max_seconds=max_seconds,
        runtime=runtime,
    )
    return times


def measure_head_times(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    heads: Sequence[Tensor | None],
    *,
    max_gamma: int,
    context_tokens: int = 256,
    batch_size: int = 1,
    num_repeats: int = 15,
    max_seconds: float = 60.0,
    runtime: DecoderConfig | None = None,
) -> list[StepTimes]:
    """The step times of one draft with each of several heads; they differ in the draft's times alone.

    Every repeat runs each width once, forwards and backwards in turn, so that a slow moment of the machine
    falls on all of them. Both models stay in the dtype and on the device that they are on.

    Args:
        heads: the ids that the draft's head is trimmed to, None for the whole head. The overhead of a round is measured
            with the last one.
        context_tokens: tokens already cached per row. batch_size: rows per forward.
        num_repeats: at most this many, fewer when `max_seconds` is over.
        runtime: how the engine will run its steps (compiled, as CUDA graphs); gamma and batch are set here.

    Raises:
        ValueError: gamma or context out of range, or a model that the runtime cannot use.
    """
    runtime = runtime or DecoderConfig()
    options = StepOptions.of(runtime)
    longest = context_tokens + max_gamma + 2
    limit = getattr(target.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if max_gamma < 1 or context_tokens < 2 or (limit is not None and longest > limit):
        raise ValueError(
            f"max_gamma={max_gamma}, context_tokens={context_tokens}: need gamma >= 1, context >= 2 and their sum "
            f"within the target's context of {limit}"
        )
    target_steps = width_steps(
        ModelRunner(target, "target", options), range(1, max_gamma + 2), context_tokens, batch_size
    )
    draft_steps: list[Callable[[], None]] = []
    for vocab_ids in heads:
        trimmed = draft if vocab_ids is None else with_trimmed_head(draft, vocab_ids)
        draft_steps += width_steps(ModelRunner(trimmed, "draft", options), (1, 2), context_tokens, batch_size)
    medians = alternated_medians([*target_steps, *draft_steps], target.device, num_repeats, max_seconds)
    target_ms, draft_ms = tuple(medians[: max_gamma + 1]), medians[max_gamma + 1 :]
    overhead_ms = measure_overhead_ms(
        target, draft, draft_vocab_ids=heads[-1], batch_size=batch_size, runtime=runtime
    )
    return [
        StepTimes(target_ms=target_ms, draft_ms=one, draft_first_ms=first, overhead_ms=overhead_ms)
        for one, first in zip(draft_ms[::2], draft_ms[1::2], strict=True)
    ]


def measure_overhead_ms(
    target: PreTrainedModel,
    draft: PreTrainedModel | MedusaHeads,
    *,
    gamma: int = 2,
    tree: str | None = None,
    batch_size: int = 1,
    num_tokens: int = 12,
    draft_vocab_ids: Tensor | None = None,
    runtime: DecoderConfig | None = None,
) -> float:
    """Milliseconds of a greedy round outside both models' forwards, from short real decoding runs with a chain or a `tree`.

    Admitting a prompt has an overhead of its own, so runs of one token (no round) are subtracted.
    """
    config = fixed_chains(
        runtime,
        num_speculative_tokens=gamma,
        max_batch_size=batch_size,
        drafter="medusa" if isinstance(draft, MedusaHeads) else "model",
        tree=tree,
        draft_confidence=0.0,
    )
    decoder = SpeculativeDecoder(target, draft, config, draft_vocab_ids=draft_vocab_ids)

    def run(max_new_tokens: int) -> tuple[float, int]:
        request = Request([1, 1, 1, 1], max_new_tokens=max_new_tokens, ignore_eos=True, seed=0)
        outputs = decoder.generate([request] * batch_size)
        overhead_ms = sum(output.stats.overhead_ms for output in outputs)
        return overhead_ms, max(output.stats.num_rounds for output in outputs)

    num_rounds = run(num_tokens)[1]
    with_rounds_ms, without_ms = (statistics.median(run(n)[0] for _ in range(3)) for n in (num_tokens, 1))
    return max(with_rounds_ms - without_ms, 0.0) / num_rounds


def model_of_shape(
    config: PretrainedConfig, *, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0
) -> PreTrainedModel:
    """A model of this config with random weights, for timing shapes whose weights are not at hand."""
    device = torch.device(device)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        with device:
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.eval()


def width_steps(
    runner: ModelRunner,
    widths: range | tuple[int, ...],
    context_tokens: int,
    batch_size: int,
    *,
    all_logits: bool = False,
) -> list[Callable[[], None]]:
    """One function per width that runs a forward of that many tokens per row behind a filled cache.

    Args:
        all_logits: of a draft's every token, as below the root of a tree; else of its last one.
    """
    runner.allocate(batch_size, context_tokens + max(widths))
    generator = torch.Generator().manual_seed(0)
    num_ids = runner.num_input_ids

    def random_ids(num_rows: int, width: int) -> Tensor:
        return torch.randint(num_ids, (num_rows, width), generator=generator).to(runner.device)

    with torch.inference_mode():
        for slot in range(batch_size):
            ids = random_ids(1, context_tokens)[0].tolist()
            runner.prefill(ids, 0, slot=slot, chunk=512, wants_logits=False)
    starts_B = torch.full((batch_size,), context_tokens, device=runner.device)

    def step_of(width: int) -> Callable[[], None]:
        ids_BL = random_ids(batch_size, width)
        num_logits = None if runner.role == "target" or all_logits else 1

        def step() -> None:
            runner.step(
                ids_BL, starts_B, num_cached=context_tokens + max(widths), num_logits=num_logits
            ).argmax(dim=-1)

        return step

    return [step_of(width) for width in widths]


def alternated_medians(
    steps: list[Callable[[], None]], device: torch.device, num_repeats: int, max_seconds: float
) -> list[float]:
    """Median milliseconds of each step; two untimed warm-up passes first."""
    started = time.perf_counter()
    times_ms: list[list[float]] = [[] for _ in steps]
    with torch.inference_mode():
        for repeat in range(-2, num_repeats):
            if repeat >= 1 and time.perf_counter() - started > max_seconds:
                break
            order = range(len(steps)) if repeat % 2 else reversed(range(len(steps)))
            for index in order:
                _synchronize(device)
                start = time.perf_counter()
                steps[index]()
                _synchronize(device)
                if repeat >= 0:
                    times_ms[index].append(1e3 * (time.perf_counter() - start))
    return [statistics.median(values) for values in times_ms]


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
