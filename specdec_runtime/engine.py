"""The decoding engine: continuous batching over slots, speculative or plain through the same code.

Shape legend: P purposes of noise, B rows (active requests), T proposed positions and one more.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Optional

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec_runtime.accounting import share_prompts, share_round
from specdec_runtime.batch import Batch
from specdec_runtime.config import DecoderConfig
from specdec_runtime.detokenize import Detokenize, StopStringFinder
from specdec_runtime.drafting import make_drafter
from specdec_runtime.forward import ModelRunner, StepOptions
from specdec_runtime.gamma import GammaPolicy, RoundReport, make_gamma_policy
from specdec_runtime.judge import Judge, Judgement
from specdec_runtime.limits import Limits, eos_ids_of
from specdec_runtime.medusa_heads import MedusaHeads
from specdec_runtime.observe import OnRound, report_rounds
from specdec_runtime.prefill import SharedPrefix, prompt_logits, share_prefix
from specdec_runtime.request import Output, Request, StreamEvent
from specdec_runtime.scheduler import Row, Scheduler
from specdec_runtime.stats import Stats
from specdec_runtime.stopwatch import Stopwatch
from specdec_runtime.verification import block_logits, keep_hidden, keep_path, last_accepted


class SpeculativeDecoder:
    """Batched speculative decoding over two Transformers causal LMs; plain decoding when there is no draft.

    Args:
        target_model: decides. Its own settings (attention implementation, generation config) are left as they are.
        draft_model: proposes, or None. Must share the target's tokenizer. With drafter="medusa", heads on the target.
        config: see `DecoderConfig`.
        draft_vocab_ids: sorted ids that the draft's head is trimmed to, or None.
        detokenize: ids -> text; needed for stop strings, and gives `Output.text`.
        on_round: called with each row's `RoundRecord` after each round, for those who want to look on; not with a tree.

    Raises:
        ValueError: a model cannot be used, memory does not suffice, or a request does not fit; names what and why.
    """

    def __init__(
        self,
        target_model: PreTrainedModel,
        draft_model: PreTrainedModel | MedusaHeads | None = None,
        config: Optional[DecoderConfig] = None,
        *,
        draft_vocab_ids: Tensor | Sequence[int] | None = None,
        detokenize: Optional[Detokenize] = None,
        on_round: Optional[OnRound] = None,
    ) -> None:
        self.config = config or DecoderConfig()
        self.target = ModelRunner(target_model, "target", StepOptions.of(self.config))
        self.device = self.target.device
        vocab_ids = None if draft_vocab_ids is None else torch.as_tensor(draft_vocab_ids, dtype=torch.long)
        self.drafter = make_drafter(self.config, draft_model, vocab_ids, target=self.target)
        self.target.keeps_hidden = self.drafter is not None and self.drafter.wants_hidden
        if on_round is not None and self.config.topology is not None:
            raise ValueError("on_round: a record is of a chain; set tree=null to look on")
        self.detokenize = detokenize
        self.on_round = on_round
        self.eos_ids = eos_ids_of(target_model)
        self.stats = Stats()
        self._limits = Limits(self.config, self.target, self.drafter)
        self._gamma: GammaPolicy = make_gamma_policy(self.config, self.device)
        self._judge = Judge(self.config, None if self.drafter is None else self.drafter.vocab_ids_N)
        tree = self.config.topology
        self._num_lanes = 1 if tree is None else tree.num_lanes
        self._watch = Stopwatch(self.device)
        self._batch: Optional[Batch] = None
        self._prefix: Optional[SharedPrefix] = None
        self._is_busy = False

    def generate(self, requests: Sequence[Request]) -> list[Output]:
        """Decodes all requests; outputs come in the order of the requests."""
        outputs: dict[int, Output] = {}
        for event in self._events(requests):
            if event.output is not None:
                outputs[event.request_index] = event.output
        return [outputs[i] for i in range(len(requests))]

    def stream(
        self, requests: Iterable[Request], *, shared_prefix: Sequence[int] = ()
    ) -> Iterator[StreamEvent]:
        """Yields tokens as they are committed. Tokens that a stop string may still take back are held until it cannot.

        A sequence is checked as a whole before anything is decoded. Any other iterable is read, and each request
        checked, when a slot is free for it, so that there may be millions; it needs `DecoderConfig.max_length`.
        Prompts that begin with `shared_prefix` have the target's keys and values of it copied.
        """
        return self._events(requests, shared_prefix)

    def _events(
        self, requests: Iterable[Request], shared_prefix: Sequence[int] = ()
    ) -> Iterator[StreamEvent]:
        if self._is_busy:
            raise ValueError(
                "this decoder is in the middle of a stream; exhaust or close it, or make another decoder"
            )
        rows: Iterable[Row] = (self._new_row(i, request) for i, request in enumerate(requests))
        if isinstance(requests, Sequence):
            rows = list(rows)
            self._limits.allocate(rows)
        else:
            self._limits.allocate_for_any()
        scheduler = Scheduler(rows, self.config.max_batch_size)
        self._is_busy = True
        try:
            self._share(shared_prefix if not scheduler.is_done else ())
            while not scheduler.is_done:
                yield from self._advance(scheduler)
        finally:
            self._is_busy = False
        self._limits.warn_if_not_accepted(self.stats)

    @torch.inference_mode()
    def _share(self, token_ids: Sequence[int]) -> None:
        self._prefix = share_prefix(self.target, token_ids, chunk=self.config.prefill_chunk_tokens)

    def _advance(self, scheduler: Scheduler) -> list[StreamEvent]:
        """Admits what fits, or else decodes one round; returns what was committed."""
        with torch.inference_mode():
            touched = self._admit(scheduler)
            if not touched:
                self._round(scheduler)
                touched = list(scheduler.active)
            finished = self._retire(scheduler)
        going_on = [row for row in touched if row.finish_reason is None]
        events = [StreamEvent(row.index, new) for row in going_on if (new := row.take_streamable())]
        for row in finished:
            output = row.output(detokenize=self.detokenize, lossless=self.config.lossless)
            self.stats.add(output.stats)
            events.append(StreamEvent(row.index, row.take_streamable(), row.finish_reason, output))
        return events

    def _new_row(self, index: int, request: Request) -> Row:
        self._limits.check_request(index, request, has_detokenize=self.detokenize is not None)
        eos_ids = () if request.ignore_eos else self.eos_ids
        seed = int(torch.randint(2**62, ()).item()) if request.seed is None else request.seed
        return Row(
            index=index,
            request=request,
            seed=seed & (2**64 - 1),
            stop_ids=frozenset((*eos_ids, *request.stop_token_ids)),
            finder=StopStringFinder(self.detokenize, request.stop, min_tokens=request.min_new_tokens)
            if request.stop and self.detokenize
            else None,
            not_speculating=self._limits.why_never_speculating(request),
        )

    def _admit(self, scheduler: Scheduler) -> list[Row]:
        """Prefills waiting requests into free slots; the logits of a prompt's last position give its first token."""
        first_slot, start_s = len(scheduler.active), scheduler.now_s()
        rows = scheduler.admit()
        if not rows:
            return rows
        with self._watch.phase("prefill"):
            logits = prompt_logits(
                self.target,
                [row.token_ids for row in rows],
                first_slot=first_slot,
                chunk=self.config.prefill_chunk_tokens,
                one_by_one=self.config.width_invariant,
                prefix=self._prefix,
            )
        self._limits.warn_if_no_numbers(rows, logits)
        batch = self._batch_of(rows)
        judgement = self._judge(logits, None, batch, batch.noise(1))
        if self.target.keeps_hidden:
            keep_hidden(self.target, rows, torch.zeros(len(rows), dtype=torch.long, device=self.device))
        now_s = scheduler.now_s()
        for i, row in enumerate(rows):
            row.commit(judgement.blocks[i], judgement.logprobs_of(i, row.request), now_s)
        prefill_ms = self._watch.take()["prefill"]
        share_prompts(rows, prefill_ms=prefill_ms, total_ms=(now_s - start_s) * 1e3)
        self._batch = None
        return rows

    def _round(self, scheduler: Scheduler) -> None:
        """One draft loop, one target forward, one transfer to the host, for all active rows."""
        rows, start_s = scheduler.active, scheduler.now_s()
        if self._batch is None:
            self._batch = self._batch_of(rows)
        batch, proposal, wanted = self._batch, None, [0] * len(rows)
        if self.drafter is not None:
            choice = self._gamma.choose(len(rows))
            wanted = self._limits.bound(rows, choice.gamma)
        uniform_PBT = batch.noise(max(wanted) + 1, num_lanes=self._num_lanes)
        if self.drafter is not None and max(wanted):
            with self._watch.phase("prefill"):
                self.drafter.catch_up(rows, wanted, chunk=self.config.prefill_chunk_tokens)
            proposal = self.drafter.propose(
                batch, wanted, uniform_PBT, self._watch, confidence=choice.confidence
            )
        width = self._limits.width(rows, 0 if proposal is None else proposal.ids_BG.shape[1])
        with self._watch.phase("verify"):
            logits = block_logits(self.target, batch, proposal, width=width)
        judgement = self._judge(logits, proposal, batch, uniform_PBT)
        self._commit(batch, judgement, scheduler.now_s())
        if self.on_round is not None:
            report_rounds(self.on_round, rows, proposal)
        self._account(rows, judgement, wanted, width, (scheduler.now_s() - start_s) * 1e3)

    def _commit(self, batch: Batch, judgement: Judgement, now_s: float) -> None:
        if judgement.path_BD is not None:
            assert self.drafter is not None and judgement.draft_path_BD is not None
            keep_path(self.target, batch, judgement.path_BD)
            if self.drafter.runner is not None:
                keep_path(self.drafter.runner, batch, judgement.draft_path_BD)
        if self.target.keeps_hidden:
            at_B = last_accepted(batch, judgement.num_accepted, judgement.path_BD)
            keep_hidden(self.target, batch.rows, at_B)
        for slot, row in enumerate(batch.rows):
            num_proposed, num_accepted = judgement.num_proposed[slot], judgement.num_accepted[slot]
            row.rounds.append((row.num_generated, num_proposed, num_accepted))
            if num_proposed:
                assert self.drafter is not None
                self.drafter.settle(row, num_accepted=num_accepted, num_drafted=judgement.num_drafted)
            kept = row.commit(judgement.blocks[slot], judgement.logprobs_of(slot, row.request), now_s)
            batch.sampling.observe(slot, kept)

    def _account(
        self, rows: Sequence[Row], judgement: Judgement, wanted: Sequence[int], width: int, round_ms: float
    ) -> None:
        times = share_round(rows, self._watch.take(), total_ms=round_ms)
        self._gamma.observe(
            RoundReport(
                rows=rows,
                num_wanted=wanted,
                num_proposed=judgement.num_proposed,
                num_accepted=judgement.num_accepted,
                num_drafted=judgement.num_drafted,
                width=width,
                **times._asdict(),
            )
        )

    def _retire(self, scheduler: Scheduler) -> list[Row]:
        finished, moves = scheduler.retire()
        for source, destination in moves:
            row = scheduler.active[destination]
            assert self.target.cache is not None
            self.target.cache.move_slot(source, destination, len(row.token_ids))
            if self.drafter is not None:
                self.drafter.move(source, destination, row)
        if finished:
            self._batch = None
        return finished

    def _batch_of(self, rows: Sequence[Row]) -> Batch:
        return Batch(rows, vocab_size=self.target.vocab_size, device=self.device)
