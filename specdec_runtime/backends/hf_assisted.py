"""Speculative decoding by Transformers' assisted generation (`assistant_model=`), batch 1 only, as a peer to compare with.

Its two hidden knobs are fixed so that it proposes exactly gamma tokens a round: the schedule is "constant"
and the confidence threshold 0 (both live on the *assistant's* generation_config). Counts come from its
candidate generator.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from specdec_runtime.backends.hf_generate import (
    TokenClock,
    cut,
    generation_config_of,
    own_generation_config,
    refuse_unsupported,
    seeded,
    stop_ids_of,
)
from specdec_runtime.request import Output, Request
from specdec_runtime.stats import Stats


class HFAssisted:
    """`generate(requests)` one request after the other, with the draft as Transformers' assistant model.

    Raises:
        ValueError: `max_batch_size` other than 1, which assisted generation does not offer.
    """

    name = "hf_assisted"

    def __init__(
        self,
        model: PreTrainedModel,
        draft: PreTrainedModel,
        *,
        num_speculative_tokens: int,
        max_batch_size: int = 1,
    ) -> None:
        if max_batch_size != 1:
            raise ValueError(
                f"max_batch_size={max_batch_size}: Transformers' assisted generation runs at batch 1 only; "
                "use the native backend for batches"
            )
        if num_speculative_tokens < 1:
            raise ValueError(
                f"num_speculative_tokens={num_speculative_tokens}: must be >= 1 (hf_generate is plain)"
            )
        self.model = model
        self.draft = draft
        self._draft_config = GenerationConfig(
            num_assistant_tokens=num_speculative_tokens,
            num_assistant_tokens_schedule="constant",
            assistant_confidence_threshold=0.0,
        )

    @torch.no_grad()
    def generate(self, requests: Sequence[Request]) -> list[Output]:
        """Outputs in request order. Raises ValueError for a parameter that `generate` cannot apply."""
        started = time.perf_counter()
        for request in requests:
            refuse_unsupported(request, self.name)
            if not request.speculate:
                raise ValueError(f"speculate=False: {self.name} always speculates; use hf_generate, or the native backend")
        return [self._generate_one(request, started) for request in requests]

    def _generate_one(self, request: Request, started: float) -> Output:
        stop_ids = stop_ids_of(self.model, request)
        ids_BT = torch.tensor([list(request.prompt_token_ids)], device=self.model.device)
        stats, clock = Stats(num_prefills=1), TokenClock()
        request_started = time.perf_counter()
        with ExitStack() as stack:
            stack.enter_context(own_generation_config(self.model, GenerationConfig()))
            stack.enter_context(own_generation_config(self.draft, self._draft_config))
            stack.enter_context(_counting(self.model, stats))
            stack.enter_context(seeded([request.seed], self.model.device))
            sequences_BT: Tensor = self.model.generate(
                input_ids=ids_BT,
                attention_mask=torch.ones_like(ids_BT),
                generation_config=generation_config_of([request], stop_ids),
                assistant_model=self.draft,
                streamer=clock,
            )
        token_ids, finish_reason = cut(sequences_BT[0, ids_BT.shape[1] :].tolist(), request, stop_ids)
        stats.num_committed = len(token_ids)
        # Its first proposals are judged in the prompt's forward, so that round is the prefill.
        stats.num_rounds -= 1
        stats.prefill_ms = 1e3 * (clock.times[0] - request_started)
        stats.verify_ms = 1e3 * (clock.times[-1] - clock.times[0])
        times = [t - started for t, n in zip(clock.times, clock.num_tokens, strict=True) for _ in range(n)]
        return Output(token_ids, finish_reason, stats, token_times_s=times[: len(token_ids)])


@contextmanager
def _counting(model: PreTrainedModel, stats: Stats) -> Iterator[None]:
    """Hooks the candidate generators that `model.generate` makes, so that `stats` gets every round's counts."""
    make: Callable[..., Any] = model._get_candidate_generator

    def make_counted(*args: Any, **kwargs: Any) -> Any:
        generator = make(*args, **kwargs)
        propose, update = generator.get_candidates, generator.update_candidate_strategy
        proposed: list[int] = []

        def get_candidates(input_ids: Tensor, **more: Any) -> Any:
            candidate_ids, logits = propose(input_ids, **more)
            proposed[:] = candidate_ids[0, input_ids.shape[1] :].tolist()
            return candidate_ids, logits

        def update_candidate_strategy(input_ids: Tensor, scores: Tensor, num_matches: int) -> None:
            update(input_ids, scores, num_matches)
            count_round(input_ids[0].tolist())

        num_seen = kwargs["input_ids"].shape[1]

        def count_round(all_ids: list[int]) -> None:
            nonlocal num_seen
            committed = all_ids[num_seen:]
            num_seen = len(all_ids)
            # `num_matches` is one short when an accepted proposal is the EOS, so the tokens themselves are compared: a
            # correction never equals the proposal that it replaces.
            pairs = zip(proposed, committed, strict=False)
            num_accepted = next(
                (i for i, (a, b) in enumerate(pairs) if a != b), min(len(proposed), len(committed))
            )
            stats.add_round(num_proposed=len(proposed), num_accepted=num_accepted)

        generator.get_candidates = get_candidates
        generator.update_candidate_strategy = update_candidate_strategy
        return generator

    model._get_candidate_generator = make_counted
    try:
        yield
    finally:
        del model._get_candidate_generator
