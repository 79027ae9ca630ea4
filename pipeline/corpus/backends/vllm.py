"""vLLM in this process's charge: requests are added as places come free, and taken out as they finish."""

import logging
import threading
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain, islice
from typing import Any

import numpy as np

from pipeline.corpus.backends.base import NON_FINITE, EngineFailure, FinishedRow, Options, misfit
from pipeline.corpus.backends.candidates import Ids, Logprobs, clamped, require_raw
from pipeline.corpus.backends.orphans import OrphanGuard
from pipeline.corpus.rows import Row
from specdec_runtime.backends.vllm import require_vllm
from specdec_runtime.backends.vllm_cpu import engine_environment
from specdec_runtime.backends.vllm_requests import sampling_arguments
from specdec_runtime.request import Request

log = logging.getLogger(__name__)

#: Requests that the engine holds, over those that it decodes: its scheduler never waits for us.
_QUEUE_FACTOR = 2
_LOOK_EVERY_S = 0.5
_KV_CACHE_GIB = 2  # on a CPU, unless VLLM_CPU_KVCACHE_SPACE says otherwise


class VllmCorpusBackend:
    """`vllm.LLM` on token ids.

    Args:
        path: the target's folder.
        engine_args: further arguments of `vllm.LLM`.

    Raises:
        ValueError: vLLM is not installed here, or does not take the model or an argument.
    """

    name = "vllm"

    def __init__(
        self,
        path: str,
        *,
        dtype: str,
        batch_size: int,
        max_length: int,
        vocab_size: int,
        topk: int,
        trust_remote_code: bool,
        engine_args: dict[str, Any],
    ) -> None:
        try:
            require_vllm()
        except ValueError as error:
            raise ValueError(f"corpus.backend=vllm: {error}") from error
        self.vocab_size, self.batch_size = vocab_size, batch_size
        arguments: dict[str, Any] = {
            "model": path,
            "dtype": dtype,
            "max_model_len": max_length,
            "max_num_seqs": batch_size,
            "max_logprobs": max(topk, 1),
            "logprobs_mode": "raw_logprobs",
            "trust_remote_code": trust_remote_code,
            "skip_tokenizer_init": True,
            **engine_args,
        }
        self._guard = OrphanGuard()
        try:
            with engine_environment(kv_cache_gib=_KV_CACHE_GIB):
                import vllm

                self.llm = vllm.LLM(**arguments)
        except (ValueError, TypeError, RuntimeError) as error:
            self._guard.close()
            raise ValueError(
                f"corpus.backend=vllm: the engine does not start with corpus.engine_args={engine_args}: {error}"
            ) from error
        self._vllm = vllm
        self.max_length = int(self.llm.llm_engine.model_config.max_model_len)
        self._closed = threading.Event()
        threading.Thread(
            target=_wake_when_dead, args=(self.llm.llm_engine.engine_core, self._closed), daemon=True
        ).start()

    def generate(self, rows: Iterable[Row], options: Options) -> Iterator[FinishedRow]:
        """See `CorpusBackend.generate`."""
        rows = iter(rows)
        if options.topk and (first := next(rows, None)) is not None:
            if self._misfit(first) is None:
                silent = replace(options, on_tokens=None)
                require_raw(lambda row: next(self._generate(iter([row]), silent)), first, engine="vLLM")
            rows = chain([first], rows)
        yield from self._generate(rows, options)

    def _generate(self, rows: Iterator[Row], options: Options) -> Iterator[FinishedRow]:
        engine, under_way = self.llm.llm_engine, dict[str, Row]()
        try:
            while True:
                num_free = _QUEUE_FACTOR * self.batch_size - len(under_way)
                for row in islice(rows, num_free):
                    reason = self._misfit(row)
                    if reason is not None:
                        yield FinishedRow(row, failure=reason)
                        continue
                    under_way[row.row_id] = row
                    prompt = {"prompt_token_ids": list(row.prompt_token_ids)}
                    engine.add_request(row.row_id, prompt, self._params(row, options))
                if not under_way:
                    return
                for output in self._step():
                    if output.finished:
                        yield self._finished(under_way.pop(output.request_id), output, options)
        finally:
            if under_way:
                self._abort(list(under_way))

    def _misfit(self, row: Row) -> str | None:
        return misfit(row, context=self.max_length, vocab_size=self.vocab_size)

    def _step(self) -> list[Any]:
        try:
            outputs: list[Any] = self.llm.llm_engine.step()
        except Exception as error:  # of many types; each means that the engine cannot go on
            raise EngineFailure(
                f"corpus.backend=vllm: the engine failed ({type(error).__name__}: {error}). Finished rows are kept: run "
                "again to go on from there"
            ) from error
        return outputs

    def _abort(self, request_ids: list[str]) -> None:
        try:
            self.llm.llm_engine.abort_request(request_ids)
        except Exception as error:  # the engine is dead, and with it the requests; what it died of is raised elsewhere
            log.info("corpus.backend=vllm: requests under way could not be taken back: %s", error)

    def _params(self, row: Row, options: Options) -> Any:
        request = Request(
            prompt_token_ids=row.prompt_token_ids,
            max_new_tokens=row.max_new_tokens,
            temperature=row.temperature,
            top_p=row.top_p,
            seed=row.seed,
            stop_token_ids=sorted(options.stop_token_ids),
            ignore_eos=True,  # the caller's ids are all that end a text
            logprobs=options.topk or None,
        )
        return self._vllm.SamplingParams(
            **sampling_arguments(request, (), has_draft=False),
            flat_logprobs=bool(options.topk),
            output_kind=self._vllm.sampling_params.RequestOutputKind.FINAL_ONLY,
        )

    def _finished(self, row: Row, output: Any, options: Options) -> FinishedRow:
        completion = output.outputs[0]
        token_ids = list(completion.token_ids)
        if list(output.prompt_token_ids) != list(row.prompt_token_ids):
            raise EngineFailure("corpus.backend=vllm: the engine changed a prompt's token ids")
        if completion.finish_reason not in ("stop", "length"):
            return FinishedRow(row, failure=f"engine_{completion.finish_reason}")
        options.report(len(token_ids))
        finished = FinishedRow(row, token_ids, completion.finish_reason)
        if options.topk:
            finished.topk_ids, finished.topk_logprobs = _unpacked(completion.logprobs, options.topk)
            if not np.isfinite(finished.topk_logprobs[:, 0]).all():
                return FinishedRow(row, failure=NON_FINITE)
        return finished

    def close(self) -> None:
        """Ends the engine's processes."""
        self._closed.set()
        self.llm.llm_engine.engine_core.shutdown()
        self._guard.close()


def _wake_when_dead(core: Any, closed: threading.Event) -> None:
    """vLLM notes the death of its engine's process, but a `step` that waits for its output would wait for ever."""
    resources: Any = getattr(core, "resources", None)
    outputs: Any = getattr(core, "outputs_queue", None)
    if outputs is None or not hasattr(resources, "engine_dead"):
        return  # the engine is in this process
    while not closed.wait(_LOOK_EVERY_S):
        if resources.engine_dead:
            outputs.put_nowait(RuntimeError("the engine's process is dead"))
            return


def _unpacked(flat: Any, topk: int) -> tuple[Ids, Logprobs]:
    """`FlatLogprobs` as arrays [N, K]: each position has its sampled token first, then its K candidates in order."""
    widths = np.array(flat.end_indices) - np.array(flat.start_indices)
    if not (widths == topk + 1).all():
        raise EngineFailure(clamped("vLLM", int(widths.min()) - 1, topk))
    ids = np.array(flat.token_ids, dtype=np.int32).reshape(-1, topk + 1)[:, 1:]
    logprobs = np.array(flat.logprobs, dtype=np.float32).reshape(-1, topk + 1)[:, 1:]
    return ids, logprobs.astype(np.float16)
