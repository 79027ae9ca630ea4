"""Planning the distillation: what each way to launch it keeps on a GPU, and how long it takes."""

import math
from dataclasses import dataclass

from pipeline.plan.formulas import (
    BF16_BYTES,
    FP32_BYTES,
    OPTIMISER_BYTES,
    all_reduce_bytes,
    head_chunk_bytes,
    head_flops,
    layer_flops,
    saved_bytes_per_token,
    saved_weight_bytes,
    trainable_parameters,
    weight_bytes,
)
from pipeline.plan.gpus import GpuType
from pipeline.plan.settings import PlanSettings
from pipeline.plan.shapes import ModelShape

ONE_PROCESS, DDP, FSDP, DEEPSPEED = "one process", "ddp", "fsdp", "deepspeed"
CACHED, ONLINE = "cached", "online"
#: CUDA context, kernels' workspaces, buffers of the collectives.
TRAINING_OVERHEAD_BYTES = 1.5e9
#: Layers that are whole on a GPU at once when weights are sharded: the one at work and the one fetched ahead.
GATHERED_LAYERS = 2


@dataclass(frozen=True)
class TrainingPlan:
    """`memory_gb` is of one GPU; `micro_batch_tokens` are supervised ones, of one GPU's forward; `host_gb` of all GPUs."""

    launch: str
    teacher: str
    num_gpus: int
    fits: bool
    micro_batch_tokens: int
    accumulation_steps: int
    memory_gb: dict[str, float]
    host_gb: float
    bound: str
    gpu_hours: float


def training_plan(
    target: ModelShape, draft: ModelShape, gpu: GpuType, settings: PlanSettings, *, launch: str, teacher: str, num_gpus: int
) -> TrainingPlan:
    """The largest micro-batch that fits, halved down to one row from `max_micro_batch_tokens`; `fits` is false where none does."""
    micro = settings.max_micro_batch_tokens
    while True:
        memory = memory_bytes(
            target, draft, settings, launch=launch, teacher=teacher, num_gpus=num_gpus, micro_batch_tokens=micro
        )
        fits = sum(memory.values()) <= gpu.usable_bytes
        if fits or micro // 2 < settings.response_tokens:
            break
        micro //= 2
    accumulation = max(1, math.ceil(settings.step_tokens / (micro * num_gpus)))
    compute_s, link_s = training_seconds(
        target, draft, gpu, settings, launch=launch, teacher=teacher, num_gpus=num_gpus, micro_batch_tokens=micro,
        accumulation_steps=accumulation,
    )  # fmt: skip
    trainable = trainable_parameters(draft, train_embeddings=settings.train_embeddings)
    return TrainingPlan(
        launch=launch,
        teacher=teacher,
        num_gpus=num_gpus,
        fits=fits,
        micro_batch_tokens=micro,
        accumulation_steps=accumulation,
        memory_gb={name: size / 1e9 for name, size in memory.items()},
        # The fp32 moments and the weights that they update.
        host_gb=(OPTIMISER_BYTES + FP32_BYTES) * trainable / 1e9 if launch == DEEPSPEED else 0.0,
        bound="compute" if compute_s >= link_s else "links",
        gpu_hours=max(compute_s, link_s) * num_gpus / 3600,
    )


def memory_bytes(
    target: ModelShape, draft: ModelShape, settings: PlanSettings, *, launch: str, teacher: str, num_gpus: int, micro_batch_tokens: int
) -> dict[str, float]:
    """Bytes on one GPU by what they hold. fsdp and deepspeed (ZeRO stage 3) share everything out; deepspeed keeps AdamW's
    moments in the machine's own memory."""
    shards = num_gpus if launch in (FSDP, DEEPSPEED) else 1
    trainable = trainable_parameters(draft, train_embeddings=settings.train_embeddings)
    forward_tokens = micro_batch_tokens * settings.row_tokens / settings.response_tokens
    saved = saved_bytes_per_token(draft, train_embeddings=settings.train_embeddings)
    memory = {
        "draft weights": weight_bytes(draft, FP32_BYTES) / shards,
        "gradients": FP32_BYTES * trainable / shards,
        "optimiser": 0.0 if launch == DEEPSPEED else OPTIMISER_BYTES * trainable / shards,
        "buffers": _buffer_bytes(draft, launch, shards, trainable),
        "bf16 weights": saved_weight_bytes(draft) + BF16_BYTES * draft.head_parameters,
        # The supervised positions' last hidden states wait for the head's gradient.
        "activations": forward_tokens * saved + micro_batch_tokens * FP32_BYTES * draft.hidden_size,
        "logits": head_chunk_bytes(draft, min(settings.head_chunk_tokens, micro_batch_tokens), has_live_teacher=teacher == ONLINE),
        "overhead": TRAINING_OVERHEAD_BYTES,
    }
    if teacher == ONLINE or settings.keep_target:
        memory["target"] = weight_bytes(target, BF16_BYTES) / shards
        memory["buffers"] += _gathered_bytes(target, BF16_BYTES) if shards > 1 else 0.0
    if teacher == ONLINE:
        # Without gradients only the layer at work holds values: MLP and residual of one forward.
        memory["activations"] += forward_tokens * (6 * target.intermediate_size + 6 * target.hidden_size)
    return {name: float(size) for name, size in memory.items()}


def _buffer_bytes(draft: ModelShape, launch: str, shards: int, trainable: int) -> float:
    """ddp's buckets are a second copy of the gradients; sharded weights are gathered before they are used."""
    if launch == DDP:
        return FP32_BYTES * float(trainable)
    return _gathered_bytes(draft, FP32_BYTES) if shards > 1 else 0.0


def _gathered_bytes(shape: ModelShape, element_bytes: int) -> float:
    layers = min(GATHERED_LAYERS, shape.num_layers) * shape.layer_parameters
    return float(element_bytes * (layers + shape.embedding_parameters))


def training_flops(target: ModelShape, draft: ModelShape, settings: PlanSettings, *, teacher: str) -> float:
    """Of all epochs: forward and a backward pass of twice its cost for the draft, and a live target's forward.

    The layers see prompts and responses; only the responses' positions reach the heads.
    """
    all_tokens = settings.num_rows * settings.row_tokens
    context = settings.row_tokens / 2
    flops = 3 * (all_tokens * layer_flops(draft, context=context) + settings.num_tokens * head_flops(draft))
    if teacher == ONLINE:
        flops += all_tokens * layer_flops(target, context=context) + settings.num_tokens * head_flops(target)
    return settings.epochs * flops


def training_seconds(
    target: ModelShape, draft: ModelShape, gpu: GpuType, settings: PlanSettings, *, launch: str, teacher: str, num_gpus: int,
    micro_batch_tokens: int, accumulation_steps: int,
) -> tuple[float, float]:  # fmt: skip
    """Seconds by the clock of computing, and of sending between GPUs, which run side by side."""
    flops = training_flops(target, draft, settings, teacher=teacher)
    compute_s = flops / (num_gpus * gpu.bf16_tflops * 1e12 * settings.train_utilisation)
    num_micro = settings.epochs * settings.num_tokens / (micro_batch_tokens * num_gpus)
    trainable = FP32_BYTES * trainable_parameters(draft, train_embeddings=settings.train_embeddings)
    share = (num_gpus - 1) / num_gpus
    sent = 0.0
    if launch == DDP:
        sent = num_micro / accumulation_steps * all_reduce_bytes(trainable, num_gpus)
    elif launch in (FSDP, DEEPSPEED):
        # Weights come twice, for the forward and for the backward pass, and gradients go once; a target comes once.
        sent = num_micro * share * (2 * weight_bytes(draft, FP32_BYTES) + trainable)
        sent += num_micro * share * weight_bytes(target, BF16_BYTES) if teacher == ONLINE else 0.0
    return compute_s, sent / (gpu.link_gb_s * 1e9)
