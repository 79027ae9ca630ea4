"""Bytes and FLOPs of a decoder from its shape. Pure functions; docs/planning.md explains them.

Letters in the comments: L layers, H hidden size, I MLP width, Q and K width of all query and key heads, V vocabulary, T tokens.
"""

from dataclasses import dataclass

from pipeline.plan.gpus import GpuType
from pipeline.plan.shapes import ModelShape

BF16_BYTES, FP32_BYTES = 2, 4
#: AdamW keeps two moments in fp32.
OPTIMISER_BYTES = 2 * FP32_BYTES


def weight_bytes(shape: ModelShape, element_bytes: int) -> int:
    """All parameters, tied ones once."""
    return shape.num_parameters * element_bytes


def kv_bytes_per_position(shape: ModelShape, element_bytes: int, *, num_shards: int = 1) -> int:
    """Keys and values of every layer at one position, on one of `num_shards` GPUs: 2 L K; a head is never split."""
    heads = -(-shape.num_kv_heads // num_shards)
    return 2 * shape.num_layers * heads * shape.head_size * element_bytes


def layer_flops(shape: ModelShape, *, context: float) -> float:
    """FLOPs of all layers for one token that attends to `context` positions: 2 per matrix weight, 4 Q per position."""
    return shape.num_layers * (2.0 * shape.layer_matrix_parameters + 4.0 * shape.query_size * context)


def head_flops(shape: ModelShape) -> float:
    """FLOPs of one row of logits."""
    return 2.0 * shape.head_parameters


def trainable_parameters(shape: ModelShape, *, train_embeddings: bool) -> int:
    """What AdamW updates: everything, or all but embeddings and head."""
    return shape.num_parameters - (0 if train_embeddings else shape.embedding_parameters)


def saved_bytes_per_token(shape: ModelShape, *, attention_bytes: int = BF16_BYTES, train_embeddings: bool = False) -> int:
    """What one token leaves behind for the backward pass, without checkpointing, under bf16 autocast over fp32 weights.

    In each layer: per norm its fp32 input and normalised input (8 H) and a scale (4); bf16 copies of the normalised input,
    one for each of the five matrices that read it (10 H); gate, up, activated gate and product in bf16 (8 I); rotated query,
    key, value and attention output in `attention_bytes`, and the output's bf16 copy (2 Q); the softmax's normaliser per head (4).
    Once: rotary cosines and sines in fp32, and the last norm.
    """
    norms = shape.num_layer_norms * (8 * shape.hidden_size + 4) + shape.has_qk_norm * 8 * (shape.query_size + shape.kv_size)
    attention = attention_bytes * 2 * (shape.query_size + shape.kv_size) + 2 * shape.query_size + 4 * shape.num_heads
    layer = norms + 10 * shape.hidden_size + 8 * shape.intermediate_size + attention
    once = 8 * shape.head_size + 8 * shape.hidden_size + 4
    # Nothing below the first norm's product needs a gradient when the embeddings are frozen.
    frozen = 0 if train_embeddings else 4 * shape.hidden_size + 4
    return shape.num_layers * layer + once - frozen


def saved_weight_bytes(shape: ModelShape) -> int:
    """bf16 copies of the layers' matrices, which autocast makes and the backward pass keeps."""
    return BF16_BYTES * shape.num_layers * shape.layer_matrix_parameters


def head_chunk_bytes(shape: ModelShape, chunk_tokens: int, *, has_live_teacher: bool) -> int:
    """One chunk's fp32 logits, their softmax and gradient; with a live teacher also its logits and probabilities and the terms
    between the two. The factors are measured peaks (`pipeline.plan.check`) of the forward KL."""
    return chunk_tokens * shape.vocab_size * (30 if has_live_teacher else 12)


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step by what bounds it; arithmetic and memory traffic overlap, traffic between GPUs does not."""

    memory_s: float
    compute_s: float
    link_s: float = 0.0

    @property
    def seconds(self) -> float:
        """max(memory, compute) + link."""
        return max(self.memory_s, self.compute_s) + self.link_s

    @property
    def bound(self) -> str:
        """What takes most of the time."""
        times = {"memory bandwidth": self.memory_s, "compute": self.compute_s, "links": self.link_s}
        return max(times, key=lambda name: times[name])


def all_reduce_bytes(num_bytes: float, num_gpus: int) -> float:
    """What a ring all-reduce sends from each GPU."""
    return 2.0 * num_bytes * (num_gpus - 1) / num_gpus


def decode_step(
    shape: ModelShape, gpu: GpuType, *, batch: int, context: float, num_shards: int = 1, utilisation: float = 1.0
) -> StepTime:
    """One token for each of `batch` rows with `context` positions behind them, tensor-parallel over `num_shards` GPUs.

    Memory: every weight once, and all rows' caches. Compute: 2 FLOPs per weight and row, and attention. Links: two
    all-reduces of the bf16 hidden states in each layer.
    """
    read = shape.read_parameters * BF16_BYTES / num_shards
    read += batch * context * kv_bytes_per_position(shape, BF16_BYTES, num_shards=num_shards)
    flops = batch * (layer_flops(shape, context=context) + head_flops(shape)) / num_shards
    sent = 2 * shape.num_layers * all_reduce_bytes(batch * shape.hidden_size * BF16_BYTES, num_shards)
    return StepTime(
        memory_s=read / (gpu.bandwidth_gb_s * 1e9 * utilisation),
        compute_s=flops / (gpu.bf16_tflops * 1e12 * utilisation),
        link_s=sent / (gpu.link_gb_s * 1e9),
    )


def ridge_batch(shape: ModelShape, gpu: GpuType) -> float:
    """Rows above which a decoding step is bound by compute, caches left aside: weights' bytes / weights' FLOPs per row."""
    return (shape.read_parameters * BF16_BYTES / (gpu.bandwidth_gb_s * 1e9)) / (
        (layer_flops(shape, context=0) + head_flops(shape)) / (gpu.bf16_tflops * 1e12)
    )


def prompt_seconds(shape: ModelShape, gpu: GpuType, *, num_tokens: float, row_tokens: int, utilisation: float) -> float:
    """GPU-seconds of a forward over rows of `row_tokens`, without their logits; a token attends to half its row."""
    return num_tokens * layer_flops(shape, context=row_tokens / 2) / (gpu.bf16_tflops * 1e12 * utilisation)
