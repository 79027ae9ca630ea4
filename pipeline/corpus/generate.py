"""Generation behind one small interface: token ids in, token ids and the teacher's top-k log-probabilities out.

Shape legend: B rows, V vocabulary, K stored candidates, N tokens of a response.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Optional, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from pipeline.corpus.decode import InPlaceLayer, fast_attention, new_cache
from pipeline.corpus.sampling import sample, uniforms

ProgressCallback = Callable[[int], None]
# Rows that are done stay in the batch until this share of it is left: copying the cache costs about one step.
_COMPACT_BELOW = 0.85
_MIN_SHARED = 4


@dataclass(frozen=True)
class Job:
    """One text to continue. `seed` decides its samples, whatever batch it is in."""

    prompt_token_ids: Sequence[int]
    seed: int


@dataclass(frozen=True)
class Sampling:
    """How a batch is sampled. `topk` counts stored log-probabilities and has no effect on the samples."""

    temperature: float
    max_new_tokens: int
    stop_token_ids: frozenset[int]
    top_p: float = 1.0
    topk: int = 0


@dataclass
class Generation:
    """What was generated: the ids exactly as sampled, a stop token included; a cut text has none.

    `topk_ids` int32 [N, K] and `topk_logprobs` float16 [N, K] are the log-softmax of the raw logits at temperature 1,
    most likely first. `failure` names why a row came to nothing.
    """

    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = "length"
    topk_ids: Optional[np.ndarray] = None
    topk_logprobs: Optional[np.ndarray] = None
    failure: Optional[str] = None


class Generator(Protocol):
    """A backend of the corpus stage."""

    name: str

    def generate(
        self, jobs: Sequence[Job], sampling: Sampling, on_tokens: Optional[ProgressCallback] = None
    ) -> list[Generation]:
        """Continue every job; results are in the jobs' order. `on_tokens` is told of new tokens as they come."""
        ...


class TransformersGenerator:
    """Batched decoding with a Transformers model: left padding, fixed batches, rows dropped as they finish.

    The batches, and the steps at which they shrink, follow from the jobs alone, so a repeated call gives the same ids.
    """

    name = "transformers"

    def __init__(self, model: PreTrainedModel, *, batch_size: int) -> None:
        self.model, self.batch_size = model, batch_size
        accepted = inspect.signature(model.forward).parameters
        self._takes_positions = "position_ids" in accepted
        self._takes_logits_to_keep = "logits_to_keep" in accepted

    def generate(
        self, jobs: Sequence[Job], sampling: Sampling, on_tokens: Optional[ProgressCallback] = None
    ) -> list[Generation]:
        """See `Generator.generate`."""
        results: list[Generation] = []
        with torch.inference_mode(), fast_attention(self.model):
            for start in range(0, len(jobs), self.batch_size):
                results += self._generate_batch(jobs[start : start + self.batch_size], sampling, on_tokens)
        return results

    def _generate_batch(
        self, jobs: Sequence[Job], sampling: Sampling, on_tokens: Optional[ProgressCallback]
    ) -> list[Generation]:
        rows = _Rows(jobs, sampling)
        longest = max(len(job.prompt_token_ids) for job in jobs)
        cache = new_cache(self.model, longest + sampling.max_new_tokens)
        num_shared = self._prefill_shared(jobs, cache)
        ids, mask = _left_padded(jobs, num_shared, self.model.device)
        can_compact = all(hasattr(layer, "batch_select_indices") for layer in cache.layers)
        for step in range(sampling.max_new_tokens):
            logits_BV = self._forward(ids, mask, cache)
            tokens_B = rows.accept(step, logits_BV)
            if on_tokens is not None:
                on_tokens(rows.num_new)
            if not rows.active:
                break
            if can_compact and len(rows.active) <= _COMPACT_BELOW * rows.width:
                keep = torch.tensor([rows.places.index(row) for row in rows.active], device=ids.device)
                tokens_B, mask = tokens_B[keep], mask[keep]
                for layer in cache.layers:
                    layer.batch_select_indices(keep)
                rows.compact()
            ids = tokens_B[:, None]
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
        return rows.results

    def _prefill_shared(self, jobs: Sequence[Job], cache: DynamicCache) -> int:
        """Run the tokens with which all prompts begin (the template's system message) once; return their number.

        Rows are padded after them. A sliding window counts cached positions, padding included, so there it is not done.
        """
        num_shared = common_prefix([job.prompt_token_ids for job in jobs])
        if num_shared < _MIN_SHARED or not all(isinstance(layer, InPlaceLayer) for layer in cache.layers):
            return 0
        ids = torch.tensor([list(jobs[0].prompt_token_ids[:num_shared])], device=self.model.device)
        self._forward(ids, torch.ones_like(ids), cache)
        for layer in cache.layers:
            layer.batch_repeat_interleave(len(jobs))
        return num_shared

    def _forward(self, ids: Tensor, mask: Tensor, cache: object) -> Tensor:
        extra: dict[str, object] = {}
        if self._takes_positions:
            extra["position_ids"] = (mask.cumsum(dim=1) - 1).clamp_(min=0)[:, -ids.shape[1] :]
        if self._takes_logits_to_keep:
            extra["logits_to_keep"] = 1
        logits: Tensor = self.model(
            input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True, **extra
        ).logits
        return logits[:, -1].float()


class _Rows:
    """The rows of one batch: which are still running and what they have got. `places` maps batch places to rows."""

    def __init__(self, jobs: Sequence[Job], sampling: Sampling) -> None:
        self.sampling = sampling
        self.results = [Generation() for _ in jobs]
        self.places = list(range(len(jobs)))
        self.active = list(self.places)
        self.num_new = 0
        shape = (len(jobs), sampling.max_new_tokens, sampling.topk)
        self.ids, self.logprobs = np.zeros(shape, np.int32), np.zeros(shape, np.float16)
        self.uniforms = (
            uniforms([job.seed for job in jobs], sampling.max_new_tokens)
            if sampling.temperature > 0
            else None
        )

    @property
    def width(self) -> int:
        return len(self.places)

    def compact(self) -> None:
        """Forget the places of finished rows."""
        self.places = list(self.active)

    def accept(self, step: int, logits_BV: Tensor) -> Tensor:
        """Choose each row's next token from raw fp32 logits, record it, and retire the rows that end; returns ids [B]."""
        logsumexp_B1 = logits_BV.logsumexp(dim=-1, keepdim=True)
        broken = (~torch.isfinite(logsumexp_B1[:, 0])).tolist()
        chosen_B = self._choose(step, logits_BV)
        if self.sampling.topk:
            values, indices = logits_BV.topk(self.sampling.topk, dim=-1)
            self.ids[self.places, step] = indices.cpu().numpy()
            self.logprobs[self.places, step] = (values - logsumexp_B1).half().cpu().numpy()
        tokens = chosen_B.tolist()
        place_of = {row: place for place, row in enumerate(self.places)}
        running = []
        for row in self.active:
            token, result = tokens[place_of[row]], self.results[row]
            if broken[place_of[row]]:
                result.failure = "non_finite_logits"
                continue
            result.token_ids.append(token)
            if token in self.sampling.stop_token_ids:
                result.finish_reason = "stop"
            elif step + 1 < self.sampling.max_new_tokens:
                running.append(row)
                continue
            self._finish(row)
        self.num_new, self.active = len(self.active), running
        return chosen_B

    def _choose(self, step: int, logits_BV: Tensor) -> Tensor:
        if self.uniforms is None:
            return logits_BV.argmax(dim=-1)
        uniforms_B = self.uniforms[self.places, step].to(logits_BV.device)
        return sample(logits_BV / self.sampling.temperature, uniforms_B, top_p=self.sampling.top_p)

    def _finish(self, row: int) -> None:
        if self.sampling.topk:
            num = len(self.results[row].token_ids)
            self.results[row].topk_ids = self.ids[row, :num].copy()
            self.results[row].topk_logprobs = self.logprobs[row, :num].copy()


def common_prefix(prompts: Sequence[Sequence[int]]) -> int:
    """How many first tokens all of several prompts share, each one's last token left out; 0 for a single prompt."""
    if len(prompts) < 2:
        return 0
    for position in range(min(len(prompt) for prompt in prompts) - 1):
        if len({prompt[position] for prompt in prompts}) > 1:
            return position
    return min(len(prompt) for prompt in prompts) - 1


def _left_padded(jobs: Sequence[Job], num_shared: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The ids after the shared ones [B, longest rest], and the mask [B, longest prompt]; padding comes before the rest.

    The padding id is 0 and never seen: the mask goes by length, not by id.
    """
    rests = [torch.tensor(list(job.prompt_token_ids[num_shared:])) for job in jobs]
    longest = max(len(rest) for rest in rests)
    ids = torch.zeros(len(jobs), longest, dtype=torch.long)
    mask = torch.ones(len(jobs), num_shared + longest, dtype=torch.long)
    for row, rest in enumerate(rests):
        num_padding = longest - len(rest)
        ids[row, num_padding:] = rest
        mask[row, num_shared : num_shared + num_padding] = 0
    return ids.to(device), mask.to(device)
