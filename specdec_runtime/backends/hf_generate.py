"""Plain decoding with Transformers' own `generate`: the baseline that users know.

Batches are left-padded, with an attention mask and position ids that start at each row's first real token.
The model's own `generation_config` (which may carry a repetition penalty or a top-k) is out of force during a
call: only what the request says is applied, and what `generate` cannot apply is refused by name.

Shapes: B rows, T padded prompt length.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Optional

import numpy as np
import torch
from torch import Tensor
from transformers import CompileConfig, GenerationConfig, PreTrainedModel

from specdec_runtime.limits import eos_ids_of
from specdec_runtime.request import Output, Request
from specdec_runtime.stats import Stats

_REFUSED = {"presence_penalty": 0.0, "logit_bias": None, "stop": (), "logprobs": None}


class HFGenerate:
    """`generate(requests)` through `PreTrainedModel.generate`, `max_batch_size` requests at a time.

    Requests with the same sampling parameters share a batch. A seed holds for a whole batch (`generate` has
    one random stream for all rows): the same list of requests gives the same output, but a row's output
    depends on its batch.

    Args:
        static_cache: preallocated KV cache; on CUDA `generate` then compiles the decoding step.
        compile_step: compile the decoding step on any device (implies `static_cache`).
    """

    name = "hf_generate"

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_batch_size: int = 8,
        static_cache: bool = False,
        compile_step: bool = False,
    ) -> None:
        if max_batch_size < 1:
            raise ValueError(f"max_batch_size={max_batch_size}: must be >= 1")
        self.model = model
        self.max_batch_size = max_batch_size
        self._options: dict[str, Any] = {}
        if static_cache or compile_step:
            self._options["cache_implementation"] = "static"
        if compile_step:
            self._options["compile_config"] = CompileConfig()
            self._options["compile_config"]._compile_all_devices = True

    @torch.no_grad()
    def generate(self, requests: Sequence[Request]) -> list[Output]:
        """Outputs in request order. Raises ValueError for a parameter that `generate` cannot apply."""
        started = time.perf_counter()
        for request in requests:
            refuse_unsupported(request, self.name)
        outputs: dict[int, Output] = {}
        for batch in self._batches(requests):
            rows = [requests[i] for i in batch]
            outputs.update(zip(batch, self._generate_batch(rows, started), strict=True))
        return [outputs[i] for i in range(len(requests))]

    def _batches(self, requests: Sequence[Request]) -> Iterator[list[int]]:
        """Indices of requests that may share a `generate` call, in order of first appearance."""
        groups: dict[tuple[object, ...], list[int]] = {}
        for index, request in enumerate(requests):
            groups.setdefault(_shared_parameters(request), []).append(index)
        for indices in groups.values():
            # Padding ids would count as seen, so penalised rows of different lengths do not share a batch.
            size = 1 if requests[indices[0]].repetition_penalty != 1.0 else self.max_batch_size
            yield from (indices[start : start + size] for start in range(0, len(indices), size))

    def _generate_batch(self, requests: Sequence[Request], started: float) -> list[Output]:
        ids_BT, mask_BT = left_padded([r.prompt_token_ids for r in requests], self.model.device)
        stop_ids = stop_ids_of(self.model, requests[0])
        clock = TokenClock()
        batch_started = time.perf_counter()
        with ExitStack() as stack:
            stack.enter_context(own_generation_config(self.model, GenerationConfig()))
            stack.enter_context(seeded([r.seed for r in requests], self.model.device))
            sequences_BT: Tensor = self.model.generate(
                input_ids=ids_BT,
                attention_mask=mask_BT,
                position_ids=(mask_BT.cumsum(dim=1) - 1).clamp_min(0),
                generation_config=generation_config_of(requests, stop_ids, **self._options),
                streamer=clock,
            )
        token_times = [t - started for t in clock.times]
        prefill_ms = 1e3 * (clock.times[0] - batch_started) / len(requests)
        decode_ms = 1e3 * (clock.times[-1] - clock.times[0]) / len(requests)
        outputs = []
        for row, request in enumerate(requests):
            token_ids, finish_reason = cut(sequences_BT[row, ids_BT.shape[1] :].tolist(), request, stop_ids)
            stats = Stats(
                num_committed=len(token_ids),
                num_rounds=len(token_ids) - 1,
                num_prefills=1,
                prefill_ms=prefill_ms,
                verify_ms=decode_ms,
            )
            outputs.append(
                Output(token_ids, finish_reason, stats, token_times_s=token_times[: len(token_ids)])
            )
        return outputs


class TokenClock:
    """A streamer that notes when each step's tokens were known on the host, and how many each row got."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.num_tokens: list[int] = []
        self._is_prompt = True

    def put(self, value: Tensor) -> None:
        """Called by `generate`, first with the prompt, then with [B] or [1, n] new ids."""
        if not self._is_prompt:
            self.times.append(time.perf_counter())
            self.num_tokens.append(value.shape[1] if value.ndim == 2 else 1)
        self._is_prompt = False

    def end(self) -> None:
        """Called by `generate` at the end."""


def refuse_unsupported(request: Request, backend: str) -> None:
    """Raises ValueError when the request asks for what Transformers' `generate` cannot do on token ids."""
    for field, neutral in _REFUSED.items():
        value = getattr(request, field)
        if (value or None) != (neutral or None) or (field == "logprobs" and value is not None):
            raise ValueError(
                f"{field}={value!r}: not offered by the backend {backend}; use the native backend"
            )


def generation_config_of(
    requests: Sequence[Request], stop_ids: Sequence[int], **options: Any
) -> GenerationConfig:
    """The requests' shared parameters, every one of them explicit: `generate` fills what is None from defaults.

    There is no pad id: `generate` then pads with the first stop id and never guesses a mask from it (an
    assistant would take real tokens for padding).
    """
    first = requests[0]
    sampling: dict[str, Any] = {"do_sample": False}
    if first.temperature > 0:
        sampling = {
            "do_sample": True,
            "temperature": first.temperature,
            "top_k": first.top_k or 0,
            "top_p": first.top_p,
            "min_p": first.min_p or None,
        }
    return GenerationConfig(
        max_new_tokens=max(r.max_new_tokens for r in requests),
        min_new_tokens=first.min_new_tokens or None,
        repetition_penalty=first.repetition_penalty,
        eos_token_id=list(stop_ids) or None,
        use_cache=True,
        **sampling,
        **options,
    )


def stop_ids_of(model: PreTrainedModel, request: Request) -> list[int]:
    """The ids that end this request's output: the model's EOS unless it is ignored, and the request's own."""
    eos_ids = () if request.ignore_eos else eos_ids_of(model)
    return [*eos_ids, *(i for i in request.stop_token_ids if i not in eos_ids)]


def cut(token_ids: list[int], request: Request, stop_ids: Sequence[int]) -> tuple[list[int], str]:
    """(ids up to the first stop id and the request's own length cap, finish reason); a batch runs to its longest row."""
    token_ids = token_ids[: request.max_new_tokens]
    end = next((i + 1 for i, token_id in enumerate(token_ids) if token_id in stop_ids), None)
    return (token_ids, "length") if end is None else (token_ids[:end], "stop")


def left_padded(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids and mask, both [B, T] on the device; the mask goes by length, never by id."""
    longest = max(len(prompt) for prompt in prompts)
    ids_BT = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    mask_BT = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return ids_BT.to(device), mask_BT.to(device)


@contextmanager
def own_generation_config(model: PreTrainedModel, config: GenerationConfig) -> Iterator[None]:
    """The model generates with `config` as its defaults; its own config comes back afterwards."""
    saved = model.generation_config
    model.generation_config = config
    try:
        yield
    finally:
        model.generation_config = saved


@contextmanager
def seeded(seeds: Sequence[Optional[int]], device: torch.device) -> Iterator[None]:
    """One random stream from all the seeds, torch's global one restored afterwards; untouched when a seed is missing."""
    if any(seed is None for seed in seeds):
        yield
        return
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(
            int(np.random.SeedSequence([int(seed or 0) for seed in seeds]).generate_state(1)[0])
        )
        yield


def _shared_parameters(request: Request) -> tuple[object, ...]:
    """What must be equal for two requests to share a `generate` call."""
    return (
        request.temperature,
        request.top_k,
        request.top_p,
        request.min_p,
        request.repetition_penalty,
        request.min_new_tokens,
        tuple(request.stop_token_ids),
        request.ignore_eos,
        request.seed is None,
    )
