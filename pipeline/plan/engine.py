"""Planning the corpus: vLLM, tensor-parallel inside a replica, data-parallel over replicas."""

import math
from dataclasses import dataclass

from pipeline.plan.formulas import (
    BF16_BYTES,
    StepTime,
    decode_step,
    kv_bytes_per_position,
    prompt_seconds,
    ridge_batch,
    weight_bytes,
)
from pipeline.plan.gpus import GpuType
from pipeline.plan.settings import PlanSettings
from pipeline.plan.shapes import ModelShape

#: GPUs of one replica: all of them in one machine.
TENSOR_PARALLEL = (1, 2, 4, 8)
#: vLLM's default `max_num_batched_tokens` for large GPUs: the tokens of its largest forward.
BATCHED_TOKENS = 8192
#: CUDA context, libraries and captured graphs.
ENGINE_OVERHEAD_BYTES = 2e9


@dataclass(frozen=True)
class CorpusPlan:
    """`memory_gb` is of one GPU at `batch` rows; `tokens_per_second` of one replica while decoding."""

    tensor_parallel: int
    num_replicas: int
    batch: int
    ridge_batch: float
    memory_gb: dict[str, float]
    kv_bytes_per_position: int
    step: StepTime
    tokens_per_second: float
    gpu_hours: dict[str, float]

    @property
    def total_gpu_hours(self) -> float:
        """All parts of the stage."""
        return sum(self.gpu_hours.values())


def engine_activation_bytes(shape: ModelShape, *, batch: int, num_shards: int) -> float:
    """The largest forward's bf16 values: gate, up and product (6 I, sharded), three of width H (6 H); fp32 logits and
    their log-softmax of every row that is decoded (8 V)."""
    forward = BATCHED_TOKENS * (6 * shape.intermediate_size / num_shards + 6 * shape.hidden_size)
    return forward + 8.0 * batch * shape.vocab_size


def corpus_plan(target: ModelShape, gpu: GpuType, settings: PlanSettings, *, num_gpus: int) -> CorpusPlan | None:
    """The tensor parallelism that takes the fewest GPU-hours on `num_gpus`, or None where no row fits."""
    plans = [
        plan
        for shards in TENSOR_PARALLEL
        if shards <= num_gpus and target.num_heads % shards == 0
        if (plan := _plan_of(target, gpu, settings, shards, num_gpus // shards)) is not None
    ]
    return min(plans, key=lambda plan: (plan.total_gpu_hours, plan.tensor_parallel), default=None)


def _plan_of(
    target: ModelShape, gpu: GpuType, settings: PlanSettings, shards: int, num_replicas: int
) -> CorpusPlan | None:
    kv_bytes = kv_bytes_per_position(target, BF16_BYTES, num_shards=shards)
    weights = weight_bytes(target, BF16_BYTES) / shards

    def free(batch: int) -> float:
        return gpu.usable_bytes - weights - ENGINE_OVERHEAD_BYTES - engine_activation_bytes(
            target, batch=batch, num_shards=shards)  # fmt: skip

    # Each row of a batch takes its cache and its logits.
    batch = min(settings.max_batch_size, math.floor(free(0) / (kv_bytes * settings.row_tokens + 8 * target.vocab_size)))
    batch = min(batch, math.ceil(settings.num_rows / num_replicas))
    if batch < 1:
        return None
    context = settings.prompt_tokens + settings.response_tokens / 2
    step = decode_step(
        target, gpu, batch=batch, context=context, num_shards=shards, utilisation=settings.decode_utilisation
    )
    prompts_s = prompt_seconds(
        target, gpu, num_tokens=settings.num_rows * settings.prompt_tokens, row_tokens=settings.prompt_tokens,
        utilisation=settings.prefill_utilisation,
    )  # fmt: skip
    memory = {
        "weights": weights,
        "kv cache": float(batch * settings.row_tokens * kv_bytes),
        "activations": engine_activation_bytes(target, batch=batch, num_shards=shards),
        "overhead": ENGINE_OVERHEAD_BYTES,
    }
    return CorpusPlan(
        tensor_parallel=shards,
        num_replicas=num_replicas,
        batch=batch,
        ridge_batch=ridge_batch(target, gpu),
        memory_gb={name: size / 1e9 for name, size in memory.items()},
        kv_bytes_per_position=kv_bytes,
        step=step,
        tokens_per_second=batch / step.seconds,
        gpu_hours={
            "prompts": prompts_s / 3600,
            "decoding": settings.num_tokens / batch * step.seconds * shards / 3600,
        },
    )
