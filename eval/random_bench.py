"""The clock on random weights of real shapes: what a machine gains at a given acceptance.

A forward's time hangs on shapes and not on values. So the models' step times are real here, and the
acceptance is chosen: each judged proposal is accepted by chance at `BenchConfig.acceptance`. The tokens mean
nothing, and every row says so (`synthetic_acceptance`, lossless false).
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from transformers import AutoConfig, PreTrainedModel

from eval.bench import BenchResult, run_bench
from eval.config import BenchConfig
from eval.shapes import PREFIX, Shape, shape_of
from eval.teacher_forcing import Draft
from eval.timing import model_of_shape
from specdec_runtime.config import DecoderConfig
from specdec_runtime.memory import free_memory_bytes

GIB = 2**30


def build_model(
    shape: Shape,
    *,
    dtype: torch.dtype,
    device: str | torch.device,
    max_tokens: int,
    seed: int = 0,
    vocab_size: int | None = None,
) -> PreTrainedModel:
    """A causal LM of this shape with seeded random weights, made on its device; it has no EOS.

    Args:
        max_tokens: positions that it must be able to hold.
        vocab_size: in place of the shape's own, for a draft that must have its target's.
    """
    config = AutoConfig.for_model(
        shape.model_type,
        vocab_size=vocab_size or shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        tie_word_embeddings=shape.is_tied,
        max_position_embeddings=max_tokens,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return model_of_shape(config, dtype=dtype, device=device, seed=seed)


def num_parameters(shape: Shape, *, vocab_size: int | None = None) -> int:
    """Weights of the shape, counted without allocating them."""
    model = build_model(shape, dtype=torch.bfloat16, device="meta", max_tokens=8, vocab_size=vocab_size)
    return sum(parameter.numel() for parameter in model.parameters())


def run_random_bench(
    config: BenchConfig,
    *,
    device: str | torch.device,
    runtime: DecoderConfig | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> BenchResult:
    """`run_bench` on random models of `config.target` and `config.draft`, with random prompts.

    Raises:
        ValueError: no target shape, or weights that do not fit into the device's free memory.
    """
    if config.target is None:
        raise ValueError(f"bench.target=null: write {PREFIX}<shape> to time random weights")
    target_shape = shape_of(config.target, field="bench.target")
    draft_shape = shape_of(config.draft, field="bench.draft")
    dtype: torch.dtype = getattr(torch, config.dtype or "bfloat16")
    _check_memory(config, target_shape, draft_shape, dtype, torch.device(device))
    max_tokens = config.prompt_tokens + config.max_new_tokens + 1
    target = build_model(target_shape, dtype=dtype, device=device, max_tokens=max_tokens, seed=config.seed)
    draft = build_model(
        draft_shape,
        dtype=dtype,
        device=device,
        max_tokens=max_tokens,
        seed=config.seed + 1,
        vocab_size=target_shape.vocab_size,
    )
    runtime = runtime or DecoderConfig()
    if config.acceptance is not None:
        runtime = replace(runtime, acceptance="synthetic", synthetic_acceptance=config.acceptance)
    return run_bench(
        target,
        {config.draft.removeprefix(PREFIX): Draft(draft)},
        random_prompts(config, target_shape.vocab_size),
        replace(config, ignore_eos=True, undistilled_gammas=None),
        runtime=runtime,
        on_progress=on_progress,
    )


def random_prompts(config: BenchConfig, vocab_size: int) -> list[list[int]]:
    """`num_prompts` prompts of `prompt_tokens` random ids, the same ones for the same seed."""
    generator = torch.Generator().manual_seed(config.seed)
    size = (config.num_prompts, config.prompt_tokens)
    prompts: list[list[int]] = torch.randint(vocab_size, size, generator=generator).tolist()
    return prompts


def _check_memory(
    config: BenchConfig, target: Shape, draft: Shape, dtype: torch.dtype, device: torch.device
) -> None:
    num_weights = num_parameters(target) + num_parameters(draft, vocab_size=target.vocab_size)
    needed_gib = num_weights * dtype.itemsize / GIB
    free_gib = free_memory_bytes(device) / GIB
    if needed_gib > free_gib:
        raise ValueError(
            f"bench.target={config.target!r} with bench.draft={config.draft!r}: the weights need "
            f"{needed_gib:.1f} GiB, {free_gib:.1f} GiB are free on {device.type}: choose a smaller shape"
        )
