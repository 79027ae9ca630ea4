"""The whole plan: every stage on as few GPUs as will do, or on those that there are, and which LAUNCH to use."""

from dataclasses import dataclass

from pipeline.estimates import (
    CHECKPOINT_BYTES_PER_PARAMETER,
    NUM_CHECKPOINTS,
    NUM_SAVED_DRAFTS,
    TOKEN_BYTES,
    TOPK_BYTES,
)
from pipeline.plan.engine import CorpusPlan, corpus_plan
from pipeline.plan.formulas import (
    BF16_BYTES,
    decode_step,
    head_flops,
    kv_bytes_per_position,
    layer_flops,
    trainable_parameters,
    weight_bytes,
)
from pipeline.plan.gpus import GpuType
from pipeline.plan.settings import PlanSettings
from pipeline.plan.shapes import ModelShape
from pipeline.plan.training import (
    CACHED,
    DDP,
    DEEPSPEED,
    FSDP,
    ONE_PROCESS,
    ONLINE,
    TrainingPlan,
    training_plan,
)

#: 214 bytes per token were measured for k = 64 (docs/training.md), of 384 before Parquet's compression.
TOPK_COMPRESSION = 214 / (64 * TOPK_BYTES)
#: Machines of eight GPUs.
GPU_COUNTS = (1, 2, 4, 8, 16, 32, 64)
#: The bench of `conf/experiment/llama3_8b_gpu.yaml`: 64 prompts of 256 tokens, 2 temperatures, 2 batch sizes, and plain
#: decoding by two engines, five gammas of the distilled draft and one of the undistilled one.
BENCH_TOKENS = 64 * 256 * 2 * 2 * (2 + 5 + 1)
BENCH_ROWS = 8
HELD_OUT_SHARE = 0.1
NATIVE_OVERHEAD_BYTES = 2e9


@dataclass(frozen=True)
class NativePlan:
    """Stages that the native runtime does, on one GPU: preflight, eval and bench."""

    memory_gb: dict[str, float]
    fits: bool
    eval_gpu_hours: float
    bench_gpu_hours: float


@dataclass(frozen=True)
class Plan:
    """Everything that is printed. `distill` holds each launch with each teacher; `chosen` is one of them."""

    target: ModelShape
    draft: ModelShape
    gpu: GpuType
    num_gpus: int
    corpus: CorpusPlan
    distill: list[TrainingPlan]
    chosen: TrainingPlan
    native: NativePlan
    disk_gb: dict[str, float]
    corpus_bytes_per_token: dict[str, float]


def make_plan(target: ModelShape, draft: ModelShape, gpu: GpuType, settings: PlanSettings) -> Plan:
    """Plan all stages.

    Raises:
        ValueError: the target or the training fits on no number of such GPUs, or not on `num_gpus`.
    """
    counts = GPU_COUNTS if settings.num_gpus is None else (settings.num_gpus,)
    for num_gpus in counts:
        corpus = corpus_plan(target, gpu, settings, num_gpus=num_gpus)
        distill = distill_plans(target, draft, gpu, settings, num_gpus=num_gpus)
        chosen = choose(distill)
        if corpus is not None and chosen is not None:
            native = native_plan(target, draft, gpu, settings)
            per_token = corpus_bytes_per_token(settings.topk)
            disk = disk_gb(target, draft, settings)
            return Plan(target, draft, gpu, num_gpus, corpus, distill, chosen, native, disk, per_token)
    raise ValueError(_misfit(target, draft, gpu, settings))


def _misfit(target: ModelShape, draft: ModelShape, gpu: GpuType, settings: PlanSettings) -> str:
    sizes = (
        f"{target.name} has {weight_bytes(target, BF16_BYTES) / 1e9:.1f} GB of bf16 weights, the draft "
        f"{draft.num_parameters / 1e9:.2f}G parameters, one {gpu.name} {gpu.usable_bytes / 1e9:.1f} usable GB"
    )
    if settings.num_gpus is None:
        return f"gpu={settings.gpu!r}: {sizes}: this fits on no number of them; choose a larger GPU or a smaller draft"
    enough = [n for n in GPU_COUNTS if corpus_plan(target, gpu, settings, num_gpus=n)
              and choose(distill_plans(target, draft, gpu, settings, num_gpus=n))]  # fmt: skip
    way_out = f"num_gpus={enough[0]} would do" if enough else "no number of them would do: choose a larger GPU"
    return f"num_gpus={settings.num_gpus}: {sizes}: this does not fit; {way_out}"


def distill_plans(
    target: ModelShape, draft: ModelShape, gpu: GpuType, settings: PlanSettings, *, num_gpus: int
) -> list[TrainingPlan]:
    """Every launch that `num_gpus` allow, with each teacher."""
    launches = [(ONE_PROCESS, 1)] + [(name, num_gpus) for name in (DDP, FSDP, DEEPSPEED) if num_gpus > 1]
    return [
        training_plan(target, draft, gpu, settings, launch=launch, teacher=teacher, num_gpus=count)
        for teacher in (CACHED, ONLINE)
        for launch, count in launches
    ]


def choose(plans: list[TrainingPlan]) -> TrainingPlan | None:
    """With the cached teacher: ddp where each GPU holds everything, else fsdp, else deepspeed; one process on one GPU."""
    for launch in (DDP, FSDP, DEEPSPEED, ONE_PROCESS):
        for plan in plans:
            if plan.fits and plan.teacher == CACHED and plan.launch == launch:
                return plan
    return None


def native_plan(target: ModelShape, draft: ModelShape, gpu: GpuType, settings: PlanSettings) -> NativePlan:
    """Memory of both models with `BENCH_ROWS` rows; hours of scoring the held-out rows and, at most, of the bench, whose
    every condition is taken to be as slow as plain decoding alone."""
    positions = BENCH_ROWS * settings.row_tokens
    memory = {
        "target weights": weight_bytes(target, BF16_BYTES),
        "draft weights": weight_bytes(draft, BF16_BYTES),
        "kv caches": positions * sum(kv_bytes_per_position(shape, BF16_BYTES) for shape in (target, draft)),
        "overhead": NATIVE_OVERHEAD_BYTES,
    }
    step = decode_step(
        target, gpu, batch=1, context=settings.row_tokens / 2, utilisation=settings.decode_utilisation
    )
    held_out, flops = HELD_OUT_SHARE, 0.0
    for shape, passes in ((target, 1), (draft, 2)):
        layers = settings.num_rows * settings.row_tokens * layer_flops(shape, context=settings.row_tokens / 2)
        flops += held_out * passes * (layers + settings.num_tokens * head_flops(shape))
    return NativePlan(
        memory_gb={name: size / 1e9 for name, size in memory.items()},
        fits=sum(memory.values()) <= gpu.usable_bytes,
        eval_gpu_hours=flops / (gpu.bf16_tflops * 1e12 * settings.prefill_utilisation) / 3600,
        bench_gpu_hours=BENCH_TOKENS * step.seconds / 3600,
    )


def corpus_bytes_per_token(topk: int) -> dict[str, float]:
    """A response token's id and its k candidates (id int32, log-probability fp16): as stored, and before compression."""
    return {
        "stored": TOKEN_BYTES + topk * TOPK_BYTES * TOPK_COMPRESSION,
        "uncompressed": float(TOKEN_BYTES + topk * TOPK_BYTES),
    }


def disk_gb(target: ModelShape, draft: ModelShape, settings: PlanSettings) -> dict[str, float]:
    """GB of the corpus, the checkpoints, the drafts that are kept, and the target's files."""
    per_token = corpus_bytes_per_token(settings.topk)
    prompts = TOKEN_BYTES * settings.num_rows * settings.prompt_tokens
    trainable = trainable_parameters(draft, train_embeddings=settings.train_embeddings)
    moments = (CHECKPOINT_BYTES_PER_PARAMETER - TOKEN_BYTES) * trainable
    sizes = {
        "corpus": settings.num_tokens * per_token["stored"] + prompts,
        "corpus, at most": settings.num_tokens * per_token["uncompressed"] + prompts,
        "checkpoints": NUM_CHECKPOINTS * (4 * draft.num_parameters + moments),
        "drafts": NUM_SAVED_DRAFTS * weight_bytes(draft, BF16_BYTES),
        "target": weight_bytes(target, BF16_BYTES),
    }
    return {name: size / 1e9 for name, size in sizes.items()}
