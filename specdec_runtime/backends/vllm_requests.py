"""Between this project's requests and vLLM's: what can be asked of it, and what its answers mean in our words.

Nothing here imports vLLM; its objects are read by attribute.
"""

from collections.abc import Sequence
from typing import Any, Optional

from specdec_runtime.request import Logprobs, Output, Request
from specdec_runtime.stats import Stats

#: vLLM raises smaller temperatures to this one and refuses those above the other (its SamplingParams).
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 2.0
MAX_PRESENCE_PENALTY = 2.0


def sampling_arguments(request: Request, eos_ids: Sequence[int], *, has_draft: bool) -> dict[str, Any]:
    """Keyword arguments of `vllm.SamplingParams` that mean what the request means.

    The model's EOS is given as stop ids and vLLM's own notion of it is switched off: it takes EOS from a tokenizer,
    and this engine works without one.

    Raises:
        ValueError: vLLM would ignore, change or refuse a parameter; names it.
    """
    refuse_unsupported(request, has_draft=has_draft)
    stop_ids = list(dict.fromkeys([*([] if request.ignore_eos else eos_ids), *request.stop_token_ids]))
    return {
        "max_tokens": request.max_new_tokens,
        "min_tokens": request.min_new_tokens,
        "temperature": request.temperature,
        "top_k": request.top_k or 0,
        "top_p": request.top_p,
        "min_p": request.min_p,
        "repetition_penalty": request.repetition_penalty,
        "presence_penalty": request.presence_penalty,
        "logit_bias": request.logit_bias or None,
        "stop_token_ids": stop_ids,
        "ignore_eos": True,
        "seed": None if request.seed is None else request.seed % 2**63,
        "logprobs": request.logprobs,
        "detokenize": False,
    }


def refuse_unsupported(request: Request, *, has_draft: bool) -> None:
    """Raises ValueError when the request asks for what vLLM cannot do, or would quietly do otherwise."""
    refused: list[tuple[str, bool, str]] = [
        ("stop", bool(request.stop), "not offered on token ids; use the native backend, or stop_token_ids"),
        (
            "temperature",
            0 < request.temperature < MIN_TEMPERATURE or request.temperature > MAX_TEMPERATURE,
            f"vLLM takes 0 or {MIN_TEMPERATURE} to {MAX_TEMPERATURE}",
        ),
        (
            "presence_penalty",
            abs(request.presence_penalty) > MAX_PRESENCE_PENALTY,
            f"vLLM takes -{MAX_PRESENCE_PENALTY} to {MAX_PRESENCE_PENALTY}",
        ),
        (
            "min_p",
            request.temperature > 0 and request.min_p > 0 and request.top_p < 1,
            f"vLLM applies min_p before top_p={request.top_p}, not after it; set one of the two",
        ),
    ]
    if has_draft:
        hint = "vLLM ignores it when a draft is loaded; use the native backend, or no draft"
        refused += [
            ("min_p", request.temperature > 0 and request.min_p > 0, hint),
            ("logit_bias", bool(request.logit_bias), hint),
            ("speculate", not request.speculate, "vLLM speculates for all requests or for none"),
        ]
    for name, is_refused, hint in refused:
        if is_refused:
            raise ValueError(f"{name}={getattr(request, name)!r}: {hint} (backend vllm)")


def refuse_too_long(request: Request, max_length: int) -> None:
    """vLLM would cut the output off at its `max_model_len` and call it finished by length."""
    length = len(request.prompt_token_ids) + request.max_new_tokens
    if length > max_length:
        raise ValueError(
            f"max_new_tokens={request.max_new_tokens}: with {len(request.prompt_token_ids)} prompt tokens that is {length}, "
            f"over this engine's max_length={max_length}; make it longer, or ask for less"
        )


class OutputBuilder:
    """Collects what vLLM gives for one request, step by step.

    Args:
        request: what was asked. started: `time.perf_counter()` at the start of the call.
    """

    def __init__(self, request: Request, started: float) -> None:
        self._request, self._started = request, started
        self._token_ids: list[int] = []
        self._times_s: list[float] = []
        self._logprobs = None if request.logprobs is None else Logprobs()
        self.output: Optional[Output] = None

    def add(self, result: Any, now: float, *, num_sharing: int) -> None:
        """Takes a `RequestOutput` of kind DELTA that arrived at `now`.

        Args:
            num_sharing: requests that ran together; each gets an equal share of the milliseconds.
        """
        completion = result.outputs[0]
        token_ids = list(completion.token_ids)
        self._token_ids += token_ids
        self._times_s += [now - self._started] * len(token_ids)
        if self._logprobs is not None:
            add_logprobs(self._logprobs, token_ids, completion.logprobs or [], self._request.logprobs or 0)
        if result.finished:
            rounds = rounds_of(completion.spec_decode_metrics, len(self._token_ids))
            stats = stats_of(rounds, len(self._token_ids))
            if result.metrics is not None:
                times = result.metrics
                stats.prefill_ms = 1e3 * (times.first_token_ts - times.scheduled_ts) / num_sharing
                stats.verify_ms = 1e3 * (times.last_token_ts - times.first_token_ts) / num_sharing
            self.output = Output(
                self._token_ids,
                "stop" if completion.finish_reason == "stop" else "length",
                stats,
                logprobs=self._logprobs,
                token_times_s=self._times_s,
            )


def add_logprobs(into: Logprobs, token_ids: Sequence[int], entries: Sequence[Any], num_top: int) -> None:
    """Appends vLLM's entries, one per token: id -> (logprob, rank), the chosen token beside the `num_top` best ones."""
    for token_id, entry in zip(token_ids, entries, strict=True):
        into.token_logprobs.append(entry[token_id].logprob)
        ranked = sorted(entry.items(), key=lambda item: (-item[1].logprob, item[1].rank))[:num_top]
        into.top_ids.append([top_id for top_id, _ in ranked])
        into.top_logprobs.append([value.logprob for _, value in ranked])


def rounds_of(metrics: Any, num_committed: int) -> list[tuple[int, int]]:
    """(proposed, accepted) of each round, by our definition: nothing behind the output's end counts.

    vLLM counts proposals behind an EOS or a length cap too. Rounds in which it proposed nothing (at the end of the
    context) are not in its record: they are what is missing to the committed tokens.
    """
    steps = (
        [] if metrics is None else list(zip(metrics.per_step_drafted, metrics.per_step_accepted, strict=True))
    )
    rounds: list[tuple[int, int]] = []
    num_left = num_committed - 1  # the first token comes from the prefill
    for num_proposed, num_accepted in steps:
        if num_left <= 0:
            break
        # Fewer left than accepted + 1: the last committed token is an accepted one, and ended the output.
        rounds.append((num_left, num_left) if num_left <= num_accepted else (num_proposed, num_accepted))
        num_left -= num_accepted + 1
    return rounds + [(0, 0)] * max(num_left, 0)


def stats_of(rounds: Sequence[tuple[int, int]], num_committed: int) -> Stats:
    """Counts of one request."""
    stats = Stats(num_committed=num_committed, num_prefills=1)
    for num_proposed, num_accepted in rounds:
        stats.add_round(num_proposed=num_proposed, num_accepted=num_accepted)
    return stats


def engine_stats(metrics: Sequence[Any]) -> Stats:
    """vLLM's own speculation counters (`LLM.get_metrics()`) as Stats: drafts are rounds.

    They count whole rounds, also where the output ended inside one.
    """
    stats = Stats()
    for metric in metrics:
        if metric.name == "vllm:spec_decode_num_drafts":
            stats.num_rounds += metric.value
        elif metric.name == "vllm:spec_decode_num_draft_tokens":
            stats.num_proposed += metric.value
        elif metric.name == "vllm:spec_decode_num_accepted_tokens":
            stats.num_accepted += metric.value
        elif metric.name == "vllm:spec_decode_num_accepted_tokens_per_pos":
            stats.add(Stats(accepted_per_position=list(metric.values)))
    return stats
