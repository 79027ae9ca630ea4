"""What vLLM's CPU build needs around it: threads, preloaded libraries, and a repair of its sampler.

`repair_cpu_sampler` is a vLLM plugin (entry point group `vllm.general_plugins`): vLLM calls it in each of its
processes, `vllm serve` included, wherever this project is installed beside it.
"""

import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

#: vLLM's own choice of threads keeps one core per physical core and leaves one of them idle: on a small machine half
#: of it or more. Up to so many processors all are used, as PyTorch does.
MAX_CPUS_TO_BIND = 8
_EXPAND_ARGUMENTS = ["output", "input_val", "cu_num_tokens", "replace_from", "replace_to", "MAX_NUM_TOKENS"]


def is_cpu_build() -> bool:
    """Whether this environment's torch, and so its vLLM, is for CPUs only."""
    return torch.version.cuda is None and torch.version.hip is None


def cpu_settings(*, kv_cache_gib: int = 1) -> dict[str, str]:
    """Environment variables for a vLLM process on this machine; empty unless it is a CPU build.

    What the user has set stays: those variables are left out, but for LD_PRELOAD, which is extended.
    """
    if not is_cpu_build():
        return {}
    settings = {"VLLM_CPU_KVCACHE_SPACE": str(kv_cache_gib)}
    cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if 0 < len(cpus) <= MAX_CPUS_TO_BIND:
        settings["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cpus))
    settings = {name: value for name, value in settings.items() if name not in os.environ}
    preloaded = os.environ.get("LD_PRELOAD", "")
    intel_openmp = Path(sys.prefix) / "lib" / "libiomp5.so"
    # vLLM asks for it: with another OpenMP, speculation on a CPU is much slower.
    if intel_openmp.is_file() and "libiomp" not in preloaded:
        settings["LD_PRELOAD"] = ":".join(filter(None, [str(intel_openmp), preloaded]))
    return settings


@contextmanager
def engine_environment(*, kv_cache_gib: int = 1) -> Iterator[None]:
    """The variables under which an engine's processes are started; this process's own come back afterwards."""
    settings = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    settings = {name: value for name, value in settings.items() if name not in os.environ}
    settings |= cpu_settings(kv_cache_gib=kv_cache_gib)
    saved = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in saved.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def repair_cpu_sampler() -> None:
    """Make vLLM's CPU build sample from the target at temperature > 0 when a draft proposes.

    Two defects of vllm-cpu 0.32.0, which greedy requests do not meet. `_expand_kernel_impl`, which hands each request's
    temperature and top-p to its proposals' rows, writes floats into an int64 copy and drops it: the target's logits are
    then divided by uninitialised memory, the output is noise and next to nothing is accepted. And `apply_top_k_only`
    fails, and the engine with it, in a step for which nothing was proposed.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.utils import cpu_triton_utils
    from vllm.v1.sample.ops import topk_topp_sampler

    if _takes(cpu_triton_utils, "_expand_kernel_impl", _EXPAND_ARGUMENTS):
        cpu_triton_utils._expand_kernel_impl = expand_to_tokens
    if _takes(topk_topp_sampler, "apply_top_k_only", ["logits", "k"]):
        topk_topp_sampler.apply_top_k_only = _skip_empty(topk_topp_sampler.apply_top_k_only)


def _takes(module: ModuleType, name: str, arguments: list[str]) -> bool:
    """Whether the module has a function of that name and those parameters: another version may not."""
    function = getattr(module, name, None)
    return function is not None and list(inspect.signature(function).parameters) == arguments


def _skip_empty(apply_top_k: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    @functools.wraps(apply_top_k)
    def apply(logits: Tensor, k: Tensor) -> Tensor:
        return apply_top_k(logits, k) if k.numel() else logits

    return apply


def expand_to_tokens(
    output: Tensor,
    input_val: Tensor,
    cu_num_tokens: Tensor,
    replace_from: float,
    replace_to: float,
    MAX_NUM_TOKENS: int | None = None,
) -> None:
    """`output` [num tokens] = each request's `input_val` [B], once per token, `replace_from` becoming `replace_to`.

    `cu_num_tokens` [B] are the running sums of tokens per request. The names are those of vLLM's kernel.
    """
    num_tokens_B = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    replaced_B = torch.where(input_val == replace_from, torch.full_like(input_val, replace_to), input_val)
    output.copy_(torch.repeat_interleave(replaced_B, num_tokens_B.long()))
