"""What `pipeline.plan.check` measures on this machine: bytes that PyTorch holds, and the machine's own peaks."""

import os
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from distill.packed_attention import supervised_hidden


def tiny_model(family: str, *, is_tied: bool = True, **sizes: object) -> PreTrainedModel:
    """Seeded fp32 weights; sizes are such that no two of them are equal."""
    settings: dict[str, object] = {
        "vocab_size": 211, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 6,
        "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    config = AutoConfig.for_model(family, **{**settings, "tie_word_embeddings": is_tied, **sizes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model.eval()


def storage_bytes(tensors: Sequence[Tensor]) -> dict[int, int]:
    """Bytes by address: what shares memory counts once."""
    return {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}


def saved_bytes(model: PreTrainedModel, num_tokens: int) -> dict[str, int]:
    """Bytes that autograd keeps of one forward as the trainer makes it, by shape and dtype, the model's own weights apart.

    Leaves the gradients of a backward pass in the model.
    """
    own = storage_bytes([*model.parameters(), *model.buffers()])
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        pointer = tensor.untyped_storage().data_ptr()
        if pointer not in own:
            kept.setdefault(pointer, tensor)
        return tensor

    positions = torch.arange(num_tokens)
    batch = {"input_ids": positions[None] % 7, "position_ids": positions[None], "supervised_S": positions}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), torch.autocast("cpu", torch.bfloat16):
        hidden_SH = supervised_hidden(model, batch)
    groups: dict[str, int] = {}
    for tensor in kept.values():
        name = f"{list(tensor.shape)} {tensor.dtype}"
        groups[name] = groups.get(name, 0) + tensor.untyped_storage().nbytes()
    torch.autograd.backward(hidden_SH.float().sum())
    return groups


def peak_bytes(work: Callable[[], None]) -> int:
    """The most bytes that PyTorch's CPU allocator held during `work`, above what it held before."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or the profiler reports its start and end
    work()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        work()
    assert profile.profiler is not None
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def bandwidth_gb_s() -> float:
    """GB a second of a sum over 512 MB."""
    values = torch.ones(2**27)
    return values.nbytes / _fastest_s(values.sum) / 1e9


def bf16_tflops() -> float:
    """Of a square matrix product."""
    matrix = torch.ones((1024, 1024), dtype=torch.bfloat16)
    return 2 * 1024**3 / _fastest_s(lambda: matrix @ matrix) / 1e12


def _fastest_s(work: Callable[[], object]) -> float:
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return min(seconds)
