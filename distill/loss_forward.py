"""The draft's summed loss on a packed batch, as an entry of its own forward.

Legend: S supervised positions of a batch, C positions of one head chunk, H hidden size, V head rows, K cached ids.
"""

import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from distill.head import ChunkLoss, LMHead, chunked_head_loss
from distill.liger import fused_summed_loss, require_fusable
from distill.objective import Objective
from distill.packed_attention import supervised_hidden
from distill.token_selection import position_losses, rows_of_positions, selection_weights, weighted


class LossForward:
    """The draft's forward with a second entry, `model(distill_batch=...)`, that returns the summed loss.

    It goes through the model's own forward so that DDP and FSDP wrappers see it; any other call is unchanged.
    """

    def __init__(
        self, draft: PreTrainedModel, target: PreTrainedModel | None, objective: Objective,
        vocab_ids: Sequence[int] | None, compute_dtype: torch.dtype, chunk_tokens: int, *, train_head: bool, is_trimmed: bool,
        keep_fraction: float = 1.0, liger: bool = False, target_head: LMHead | None = None,
    ) -> None:
        """`target_head`: the target's head, where it cannot be read from the target."""
        self.draft, self.target, self.objective = draft, target, objective
        self.rows = None if vocab_ids is None else torch.as_tensor(list(vocab_ids), device=draft.device)
        # Rows to take from the draft's head: all, where it holds the shortlist's only.
        self.head_ids = None if vocab_ids is None or is_trimmed else list(vocab_ids)
        self.compute_dtype, self.chunk_tokens = compute_dtype, chunk_tokens
        self.frozen_head = None if train_head else LMHead.of(draft, self.head_ids).to(compute_dtype)
        self.keep_fraction = keep_fraction
        self.target_head = target_head if target is None or target_head is not None else LMHead.of(target)
        self.liger = liger
        if liger:
            require_fusable(
                objective, LMHead.of(draft), self.target_head, has_shortlist=vocab_ids is not None, selects_tokens=keep_fraction < 1
            )

    def install(self) -> None:
        """Put the second entry in place of the patch that SFTTrainer made."""
        self.uninstall()
        plain: Callable[..., Any] = self.draft.forward

        def forward(model: PreTrainedModel, *args: Any, distill_batch: dict[str, Tensor] | None = None, **kwargs: Any) -> Any:
            return plain(*args, **kwargs) if distill_batch is None else self.summed_loss(distill_batch)

        self.draft.forward = types.MethodType(forward, self.draft)

    def uninstall(self) -> None:
        """Give the draft its own forward back."""
        self.draft.__dict__.pop("forward", None)

    def summed_loss(self, batch: dict[str, Tensor]) -> Tensor:
        """Sum over the batch's S supervised positions, a scalar; with `reference_loss_S`, over those that are selected."""
        hidden_SH, head = self._draft_side(batch)
        if self.liger:
            assert self.target_head is not None
            target_SH = self._target_hidden(batch)
            return fused_summed_loss(hidden_SH, head, target_SH, self.target_head, self.objective, self.compute_dtype)
        chunk_loss = self._chunk_loss(batch)
        options: dict[str, Any] = {"chunk_tokens": self.chunk_tokens, "compute_dtype": self.compute_dtype}
        if "reference_loss_S" in batch:
            gain_S = position_losses(hidden_SH, head, chunk_loss, **options) - batch["reference_loss_S"]
            chunk_loss = weighted(chunk_loss, selection_weights(gain_S, rows_of_positions(batch), self.keep_fraction))
        return chunked_head_loss(hidden_SH, head, chunk_loss, **options)

    def position_losses(self, batch: dict[str, Tensor]) -> Tensor:
        """The loss at every supervised position, shape S, without gradient."""
        with torch.no_grad():
            side = self._draft_side(batch)
            return position_losses(
                *side, self._chunk_loss(batch), chunk_tokens=self.chunk_tokens, compute_dtype=self.compute_dtype
            )

    def _draft_side(self, batch: dict[str, Tensor]) -> tuple[Tensor, LMHead]:
        autocast = self.compute_dtype != torch.float32
        with torch.autocast(self.draft.device.type, dtype=torch.bfloat16, enabled=autocast):
            hidden_SH = supervised_hidden(self.draft, batch)
        return hidden_SH, self.frozen_head or LMHead.of(self.draft, self.head_ids)

    def _target_hidden(self, batch: dict[str, Tensor]) -> Tensor:
        assert self.target is not None
        with torch.no_grad():
            return supervised_hidden(self.target, batch)

    def _chunk_loss(self, batch: dict[str, Tensor]) -> ChunkLoss:
        return self._cached_loss(batch) if self.target is None else self._live_loss(batch)

    def _cached_loss(self, batch: dict[str, Tensor]) -> ChunkLoss:
        ids_SK, logp_SK, tokens_S = batch["topk_rows_SK"], batch["topk_logp_SK"], batch["token_rows_S"]

        def chunk_loss(logits_CV: Tensor, start: int, end: int) -> Tensor:
            return self.objective.topk(ids_SK[start:end], logp_SK[start:end], logits_CV, tokens_S[start:end])

        return chunk_loss

    def _live_loss(self, batch: dict[str, Tensor]) -> ChunkLoss:
        assert self.target_head is not None
        target_head, tokens_S, target_SH = self.target_head, batch.get("token_rows_S"), self._target_hidden(batch)

        def chunk_loss(logits_CV: Tensor, start: int, end: int) -> Tensor:
            with torch.no_grad():
                target_CV = target_head.logits(target_SH[start:end])
            tokens_C = None if tokens_S is None else tokens_S[start:end]
            return self.objective.full(target_CV, logits_CV, tokens_C, self.rows)

        return chunk_loss
