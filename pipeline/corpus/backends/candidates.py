"""The teacher's candidates as engines hand them over: brought into one form, and checked to be what they must be.

Shape legend: N tokens of a response, K stored candidates.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Optional

import numpy as np
import numpy.typing as npt

from pipeline.corpus.backends.base import EngineFailure, FinishedRow
from pipeline.corpus.rows import Row

Ids = npt.NDArray[np.int32]
Logprobs = npt.NDArray[np.float16]
#: Two forwards of the same prompt may differ by this much in bf16; sampling parameters change far more.
_RAW_TOLERANCE = 0.25
_PROBE_TOKENS = 8


def pack(per_token: list[dict[int, float]], topk: int, *, engine: str) -> tuple[Ids, Logprobs]:
    """The K most likely of each token's candidates, int32 [N, K] and float16 [N, K], most likely first.

    Args:
        per_token: id -> log-probability; may hold the sampled token beyond the K.

    Raises:
        EngineFailure: there are fewer than K.
    """
    ids = np.zeros((len(per_token), topk), np.int32)
    logprobs = np.zeros((len(per_token), topk), np.float32)
    for position, candidates in enumerate(per_token):
        if len(candidates) < topk:
            raise EngineFailure(clamped(engine, len(candidates), topk))
        best = sorted(candidates.items(), key=lambda item: (-item[1], item[0]))[:topk]
        ids[position] = [token_id for token_id, _ in best]
        logprobs[position] = [logprob for _, logprob in best]
    return ids, logprobs.astype(np.float16)


def clamped(engine: str, num_given: int, topk: int) -> str:
    """What to say of an engine that gives too few candidates."""
    return (
        f"corpus.topk={topk}: {engine} gives only {num_given} log-probabilities per token. Start it so that it gives more "
        f"(vLLM: --max-logprobs {topk}), set corpus.topk={num_given}, or corpus.rescore=true to compute them here"
    )


def require_raw(answer: Callable[[Row], FinishedRow], row: Row, *, engine: str) -> None:
    """Ask for one token twice, greedily and with a temperature and nucleus, and hold the log-probabilities together.

    Raises:
        EngineFailure: the request failed, or the log-probabilities depend on the sampling parameters: they are those
            of the warped distribution, which says less than the target's own.
    """
    first: Optional[FinishedRow] = None
    for temperature, top_p in ((0.0, 1.0), (2.0, 0.5)):
        prompt = row.prompt_token_ids[:_PROBE_TOKENS]
        probe = replace(
            row,
            prompt_token_ids=prompt,
            temperature=temperature,
            top_p=top_p,
            max_new_tokens=1,
            sample_index=-1,
        )
        finished = answer(probe)
        if finished.failure is not None:
            raise EngineFailure(f"{engine} does not answer a request for one token: {finished.failure}")
        first = first or finished
    assert first is not None and first.topk_logprobs is not None and finished.topk_logprobs is not None
    plain, warped = (x.astype(np.float32)[0] for x in (first.topk_logprobs, finished.topk_logprobs))
    if not np.allclose(plain, warped, atol=_RAW_TOLERANCE, rtol=0.05) or np.exp(plain).sum() > 1.01:
        raise EngineFailure(
            f"{engine} returns log-probabilities that depend on temperature and top_p ({plain[0]:.3f} against {warped[0]:.3f} "
            "for the first candidate): start it with raw ones (vLLM: --logprobs-mode raw_logprobs), or set corpus.rescore=true"
        )
