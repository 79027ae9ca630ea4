"""What a decoder refuses, and how far it lets speculation go: memory, contexts, and the guards of the config."""

import logging
from collections.abc import Sequence
from typing import Optional

from torch import Tensor
from transformers import PreTrainedModel

from specdec_runtime.config import DecoderConfig
from specdec_runtime.forward import ModelRunner
from specdec_runtime.memory import free_memory_bytes
from specdec_runtime.proposal import Proposer
from specdec_runtime.request import Request
from specdec_runtime.scheduler import Row
from specdec_runtime.stats import Stats

logger = logging.getLogger("specdec_runtime")

_GIB = 2**30
_MIN_JUDGED_TO_WARN = 100


class Limits:
    """Bounds of one decoder."""

    def __init__(self, config: DecoderConfig, target: ModelRunner, drafter: Optional[Proposer]) -> None:
        self.config, self.target, self.drafter = config, target, drafter
        self._tree, self._max_proposals = config.topology, config.max_proposals
        self._has_warned = self._has_warned_of_nan = False

    def check_request(self, index: int, request: Request, *, has_detokenize: bool) -> None:
        """Raises ValueError when a request cannot be served as asked."""
        vocab_size, context = self.target.vocab_size, self.target.context
        length = len(request.prompt_token_ids) + request.max_new_tokens
        limit = min(context, self.config.max_length or context)
        if length > limit:
            source = "max_length" if limit != context else "the target's context"
            raise ValueError(
                f"request {index}: prompt of {len(request.prompt_token_ids)} tokens + max_new_tokens="
                f"{request.max_new_tokens} is {length}, above {source} of {limit}; shorten one of them"
            )
        named = {"prompt_token_ids": request.prompt_token_ids, "stop_token_ids": request.stop_token_ids}
        named["logit_bias"] = list(request.logit_bias or ())
        for name, ids in named.items():
            wrong = [token_id for token_id in ids if not 0 <= token_id < vocab_size]
            if wrong:
                raise ValueError(
                    f"request {index}: {name} has id {wrong[0]}, outside the vocabulary of {vocab_size}"
                )
        if request.logprobs is not None and request.logprobs > vocab_size:
            raise ValueError(
                f"request {index}: logprobs={request.logprobs} is above the vocabulary of {vocab_size}"
            )
        if request.stop and not has_detokenize:
            raise ValueError(
                f"request {index}: stop={list(request.stop)} needs SpeculativeDecoder(..., detokenize=...)"
            )

    def allocate(self, rows: Sequence[Row]) -> None:
        """Allocates the caches for these rows.

        Raises:
            ValueError: they do not fit into `kv_memory_limit_gib` or the free memory; names all figures.
        """
        if not rows:
            return
        longest = max(len(row.token_ids) + row.request.max_new_tokens for row in rows)
        num_slots = self.config.max_batch_size
        if not self.config.width_invariant:
            num_slots = min(num_slots, len(rows))
        self._allocate(num_slots, self.config.max_length or longest)

    def allocate_for_any(self) -> None:
        """Allocates the caches for rows that are not known yet: all slots, `max_length` tokens each.

        Raises:
            ValueError: no `max_length`, or as `allocate`.
        """
        if self.config.max_length is None:
            raise ValueError(
                "max_length=null: an open stream of requests needs the length of the longest one"
            )
        self._allocate(self.config.max_batch_size, self.config.max_length)

    def _allocate(self, num_slots: int, capacity: int) -> None:
        # Room for a block that is padded behind the last token of a full row.
        num_draft_places = self._max_proposals if self._tree is None else self._tree.num_draft_places
        capacity += max(self.config.fixed_width or 0, self._max_proposals + 1, num_draft_places + 1)
        plans = [("target", self.target, capacity)]
        draft = None if self.drafter is None else self.drafter.runner
        if draft is not None:
            # The nodes of one depth share a position, but each has a place of its own; and a row that may propose no more takes
            # part in the steps of those that may.
            plans.append(("draft", draft, min(capacity, draft.context + num_draft_places)))
        held = sum(
            r.kv_bytes(r.cache.num_slots, r.cache.capacity) for _, r, _ in plans if r.cache is not None
        )
        needed = {name: runner.kv_bytes(num_slots, size) for name, runner, size in plans}
        limit = self.config.kv_memory_limit_gib
        available = limit * _GIB if limit is not None else free_memory_bytes(self.target.device) + held
        if sum(needed.values()) > available:
            parts = " + ".join(f"{size / _GIB:.3f} GiB for the {name}" for name, size in needed.items())
            raise ValueError(
                f"KV caches need {parts} ({num_slots} slots of {capacity} tokens), but "
                f"{'kv_memory_limit_gib allows' if limit is not None else 'there are'} {available / _GIB:.3f} GiB"
                f"{'' if limit is not None else ' free'}; lower max_batch_size, max_length or max_new_tokens"
            )
        for _, runner, size in plans:
            runner.allocate(num_slots, size)

    def why_never_speculating(self, request: Request) -> Optional[str]:
        """The reason why a request is decoded plainly from the start, or None."""
        limit = self.config.max_prompt_tokens_to_speculate
        if self.drafter is None:
            return "no draft"
        if not request.speculate:
            return "speculate=False"
        if limit is not None and len(request.prompt_token_ids) > limit:
            return f"prompt of {len(request.prompt_token_ids)} tokens is above max_prompt_tokens_to_speculate={limit}"
        return None

    def bound(self, rows: Sequence[Row], gamma: int) -> list[int]:
        """Proposals per row: what the policy chose, within all limits. Sets `row.not_speculating` where a limit ends it."""
        assert self.drafter is not None
        draft = self.drafter.runner
        # Of a tree, max_draft_tokens bounds the nodes and not the depth.
        most = (
            gamma if self._tree is not None else min(gamma, max(1, self.config.max_draft_tokens // len(rows)))
        )
        bounded = []
        for row in rows:
            # The last proposal is sampled from the position of the one before it, which the draft must be able to hold.
            room = gamma if draft is None else draft.context - len(row.token_ids) + 1
            if draft is not None and room < 1 and row.not_speculating is None:
                row.not_speculating = f"beyond the draft's context of {draft.context} tokens"
            if row.not_speculating is not None:
                bounded.append(0)
            else:
                bounded.append(max(0, min(most, row.num_remaining - 1, room)))
        return bounded

    def width(self, rows: Sequence[Row], num_proposed: int) -> int:
        """Tokens per row of the target's forward, constant over a run with a draft model or heads and a fixed gamma: kernels may round by
        width. Looked-up proposals are of any length, most often none: padding them all would cost more than they bring."""
        if self.config.fixed_width is not None:
            return self.config.fixed_width
        is_speculating = any(row.not_speculating is None for row in rows)
        if self.config.gamma == "fixed" and self.config.drafter != "ngram" and is_speculating:
            per_row = max(1, self.config.max_draft_tokens // len(rows))
            return 1 + min(self._max_proposals, per_row)
        return 1 + num_proposed

    def warn_if_no_numbers(self, rows: Sequence[Row], logits_BLV: Tensor) -> None:
        """Warns, once per decoder, of a target that gives NaN for a prompt: whatever is put out then means nothing."""
        if self._has_warned_of_nan:
            return
        for row, is_nan in zip(rows, logits_BLV.isnan().flatten(1).any(dim=1).tolist(), strict=True):
            if is_nan:
                self._has_warned_of_nan = True
                logger.warning(
                    "the target's logits of request %d are NaN: its output means nothing; are the model's weights whole, and does "
                    "dtype %s hold its numbers (bfloat16 and float32 have a wider range than float16)?",
                    row.index,
                    self.target.dtype,
                )
                return

    def warn_if_not_accepted(self, stats: Stats) -> None:
        """Warns, once per decoder, when the draft's tokens mostly fall when they are judged."""
        num_judged = sum(stats.judged_per_position)
        if self._has_warned or num_judged < _MIN_JUDGED_TO_WARN:
            return
        rate = stats.num_accepted / num_judged
        if rate < self.config.min_conditional_acceptance:
            self._has_warned = True
            remedy = (
                "raise ngram_min" if self.config.drafter == "ngram" else "distil the draft for this traffic"
            )
            logger.warning(
                "the target accepts %.0f%% of the draft tokens that it judges (min_conditional_acceptance=%.2f): "
                "%s, lower num_speculative_tokens, or set gamma=auto",
                100 * rate,
                self.config.min_conditional_acceptance,
                remedy,
            )


def eos_ids_of(model: PreTrainedModel) -> tuple[int, ...]:
    """The ids that end an output: the generation config's, else the config's; possibly none.

    Ids that the model cannot put out are left out: some configs name those of a larger tokenizer, or -1 for none.
    """
    ids = getattr(model.generation_config, "eos_token_id", None)
    if ids is None:
        ids = getattr(model.config.get_text_config(), "eos_token_id", None)
    num_ids = model.get_output_embeddings().weight.shape[0]
    named = ids if isinstance(ids, (list, tuple)) else () if ids is None else (ids,)
    return tuple(token_id for token_id in named if 0 <= token_id < num_ids)
