"""The draft's side of a round: keep its cache valid, then propose a chain of tokens for each row.

Shape legend: B rows, G proposed positions, N ids the draft can propose.
"""

import copy
from collections.abc import Sequence
from typing import Any, Optional

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec_runtime.batch import Batch
from specdec_runtime.forward import ModelRunner, StepOptions
from specdec_runtime.noise import DRAFT
from specdec_runtime.prefill import Feed, feed_all
from specdec_runtime.proposal import Proposal
from specdec_runtime.scheduler import Row
from specdec_runtime.stopwatch import Stopwatch
from specdec_runtime.verify import sample_by_inverse_cdf


class Drafter:
    """Proposes tokens with a draft model.

    Args:
        model: the draft. target_vocab_size: ids beyond it are never proposed (padded vocabularies differ in width).
        vocab_ids: sorted ids that its head is trimmed to (FR-Spec, arXiv 2502.14856); None for the whole head. Only these
            rows of the head are multiplied, so q is zero elsewhere.
        sampler: "probabilistic" (q is sampled) or "greedy" (argmax).
        max_spread: no row proposes more than this above the row that its confidence stopped first.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        target_vocab_size: int,
        vocab_ids: Optional[Tensor],
        sampler: str,
        max_spread: int,
        options: Optional[StepOptions] = None,
    ) -> None:
        self.runner = ModelRunner(
            model if vocab_ids is None else with_trimmed_head(model, vocab_ids), "draft", options
        )
        self.sampler, self.max_spread, self.wants_hidden = sampler, max_spread, False
        # The target may commit an id that a draft with a narrower vocabulary has not: it guesses badly there, no more.
        self.runner.clamps_ids = self.runner.num_input_ids < target_vocab_size
        self.num_columns: Optional[int] = None
        self.vocab_ids_N: Optional[Tensor] = None
        device = self.runner.device
        if vocab_ids is not None:
            if int(vocab_ids[-1]) >= target_vocab_size:
                raise ValueError(
                    f"draft_vocab_ids: id {int(vocab_ids[-1])} is not in the target's vocabulary of {target_vocab_size}"
                )
            self.vocab_ids_N = vocab_ids.to(device)
        elif self.runner.vocab_size > target_vocab_size:
            self.num_columns = target_vocab_size
        elif self.runner.vocab_size < target_vocab_size:
            self.vocab_ids_N = torch.arange(self.runner.vocab_size, device=device)

    def catch_up(self, rows: Sequence[Row], wanted: Sequence[int], *, chunk: int) -> None:
        """Feeds committed tokens that the draft has not seen, but for the last two, of the rows that want proposals."""
        feeds = []
        assert self.runner.cache is not None
        for slot, (row, num) in enumerate(zip(rows, wanted, strict=True)):
            if num and row.draft_valid == 0:
                self.runner.cache.clean(slot)
            if num and row.draft_valid < len(row.token_ids) - 2:
                feeds.append(Feed(slot, row.token_ids[row.draft_valid : -2], row.draft_valid))
                row.draft_valid = len(row.token_ids) - 2
        feed_all(self.runner, feeds, chunk=chunk)

    def propose(
        self,
        batch: Batch,
        wanted: Sequence[int],
        uniform_PBT: Optional[Tensor],
        watch: Stopwatch,
        *,
        confidence: float = 0.0,
    ) -> Proposal:
        """Runs up to max(wanted) draft steps for all rows; without `confidence`, without a word to the host.

        The first step feeds the last two committed tokens: after a fully accepted round the draft has not seen the last
        proposal, and feeding it always keeps the shapes fixed (seeing it twice changes nothing).

        Args:
            wanted: proposals to be judged per row; a row that wants none sits out.
            uniform_PBT: noise by purpose, row and position (`noise.uniforms`); None when nothing is sampled.
            confidence: a row stops behind a proposal when the product of the draft's largest probabilities (temperature 1) so
                far is below it. The largest and not the drawn one's: what is drawn must not decide whether it is judged.
                Whether any row goes on is asked after each step, for which a GPU must wait.
        """
        rows, sampling, num_steps = batch.rows, batch.sampling, max(wanted)
        lengths_B, num_wanted_B = batch.column([len(row.token_ids) for row in rows]), batch.column(wanted)
        settings = round_settings(batch, wanted, num_places=num_steps)
        feed = torch.tensor([row.token_ids[-2:] for row in rows], device=batch.device)
        starts_B, proposed_BG = lengths_B - 2, feed[:, :0]
        by_argmax = self.sampler == "greedy" or sampling.all_greedy
        ids, probs = [], []
        chance_B, goes_on_B = (
            torch.ones(len(rows), device=batch.device),
            torch.ones_like(lengths_B, dtype=torch.bool),
        )
        num_proposed_B = torch.zeros_like(lengths_B)
        for step in range(num_steps):
            with watch.phase("draft"):
                logits = self.runner.step(feed, starts_B, num_logits=1, **settings)
            logits_B1N = sampling.adjust(
                logits[..., : self.num_columns],
                num_generated_B=batch.num_generated(),
                proposed_BG=proposed_BG,
                first_offset=step,
                vocab_ids_N=self.vocab_ids_N,
            )
            if by_argmax:
                columns_B = logits_B1N.squeeze(1).argmax(dim=1)
            else:
                assert uniform_PBT is not None
                probs.append(sampling.warp(logits_B1N).squeeze(1))
                columns_B = sample_by_inverse_cdf(probs[-1], uniform_PBT[DRAFT, :, step])
            next_B = columns_B if self.vocab_ids_N is None else self.vocab_ids_N[columns_B]
            num_proposed_B = num_proposed_B + goes_on_B
            ids.append(next_B)
            proposed_BG = torch.stack(ids, dim=1)
            feed, starts_B = next_B[:, None], lengths_B + step
            if confidence > 0 and step + 1 < num_steps:
                chance_B = chance_B * logits_B1N.squeeze(1).softmax(dim=1).amax(dim=1)
                goes_on_B = self._going_on(
                    goes_on_B & (chance_B >= confidence), num_wanted_B > 0, num_proposed_B
                )
                if not bool(goes_on_B.any()):
                    break
        for row, num in zip(rows, wanted, strict=True):
            row.times.num_draft_steps += len(ids) if num else 0
        return Proposal(
            proposed_BG,
            torch.minimum(num_proposed_B, num_wanted_B),
            torch.stack(probs, dim=1) if ids and not by_argmax else None,
        )

    def settle(self, row: Row, *, num_accepted: int, num_drafted: int) -> None:
        """The cache holds the row's committed tokens up to the last accepted one: the draft was fed every proposal but the last."""
        row.draft_valid = len(row.token_ids) + min(num_accepted, num_drafted - 1)

    def move(self, source: int, destination: int, row: Row) -> None:
        """Copies the row's keys and values to another slot."""
        if self.runner.cache is not None:
            self.runner.cache.move_slot(source, destination, row.draft_valid)

    def _going_on(self, sure_B: Tensor, takes_part_B: Tensor, num_proposed_B: Tensor) -> Tensor:
        """Rows that propose one more: those that are sure enough, and not too far ahead of the row that stopped first."""
        sure_B = sure_B & takes_part_B
        has_stopped_B = takes_part_B & ~sure_B
        fewest = num_proposed_B.masked_fill(~has_stopped_B, 2**31).min()
        return sure_B & (num_proposed_B < fewest + self.max_spread)


def round_settings(batch: Batch, wanted: Sequence[int], *, num_places: int) -> dict[str, Any]:
    """What all of a round's draft forwards are given: how far they attend, with `num_places` for proposals behind the committed
    tokens, and the rows that want none and sit out."""
    longest = max(len(row.token_ids) for row, num in zip(batch.rows, wanted, strict=True) if num)
    sits_out_B = batch.column(wanted) == 0 if min(wanted) == 0 else None
    return {"num_cached": longest + num_places, "sits_out_B": sits_out_B}


def with_trimmed_head(model: PreTrainedModel, vocab_ids: Tensor) -> PreTrainedModel:
    """The same model (its weights are shared) with a head of the given rows only; the rows are copied once.

    Raises:
        ValueError: ids are not sorted, repeat, or lie outside the model's vocabulary.
    """
    head = model.get_output_embeddings()
    num_rows = head.weight.shape[0]
    if vocab_ids.ndim != 1 or not len(vocab_ids) or bool((vocab_ids[1:] <= vocab_ids[:-1]).any()):
        raise ValueError(
            "draft_vocab_ids: give a non-empty list of ids, sorted ascending and without repeats"
        )
    if int(vocab_ids[0]) < 0 or int(vocab_ids[-1]) >= num_rows:
        raise ValueError(
            f"draft_vocab_ids: ids must lie in the draft's vocabulary of {num_rows}; got {int(vocab_ids[-1])}"
        )
    rows = vocab_ids.to(head.weight.device)
    trimmed = nn.Linear(head.weight.shape[1], len(rows), bias=head.bias is not None, device="meta")
    trimmed.weight = nn.Parameter(head.weight.detach()[rows].clone(), requires_grad=False)
    if head.bias is not None:
        trimmed.bias = nn.Parameter(head.bias.detach()[rows].clone(), requires_grad=False)
    shared = copy.copy(model)
    shared._modules = dict(model._modules)
    shared.set_output_embeddings(trimmed)
    return shared
