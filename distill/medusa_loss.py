"""The summed loss of Medusa's heads on a packed batch.

Legend: T input tokens of a batch, S its supervised positions, N of them that a head is trained at, H hidden size, K cached ids.
"""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from distill.head import ChunkLoss, LMHead, chunked_head_loss
from distill.objective import Objective
from distill.packed_attention import supervised_hidden
from distill.token_selection import rows_of_positions
from specdec_runtime.medusa_heads import MedusaHeads

#: Weight of head k is this to the power of k, as in the paper: what is further ahead is harder, and worth less.
HEAD_DECAY = 0.8


def positions_ahead(row_S: Tensor, num_ahead: int) -> tuple[Tensor, Tensor]:
    """Pairs of supervised positions of one row, the second `num_ahead` behind the first: indices into S, N each.

    Args:
        row_S: number of the row that each position lies in; rows lie end to end.
    """
    from_N = torch.nonzero(row_S[: max(0, len(row_S) - num_ahead)] == row_S[num_ahead:])[:, 0]
    return from_N, from_N + num_ahead


class MedusaLoss(nn.Module):
    """The heads, with a forward that gives their loss; the target is frozen, and no part of what is trained or saved.

    At position t head k is held against what the target says at t + k, given the true tokens before: from the corpus's cached
    top-k of t + k, or from the target's own head. The last k positions of a response have nothing k ahead of them.
    """

    def __init__(
        self,
        heads: MedusaHeads,
        target: PreTrainedModel,
        objective: Objective,
        *,
        teacher: str,
        compute_dtype: torch.dtype,
        chunk_tokens: int,
    ) -> None:
        super().__init__()
        self.heads, self.objective = heads, objective
        self.compute_dtype, self.chunk_tokens = compute_dtype, chunk_tokens
        self._target = (target.eval(),)  # in a tuple, so that it is no submodule
        self._target_head = LMHead.of(target).to(target.dtype) if teacher == "online" else None

    @property
    def device(self) -> torch.device:
        """Where the heads lie."""
        return self.heads.device

    def forward(self, distill_batch: dict[str, Tensor]) -> Tensor:
        """Sum over heads and positions of HEAD_DECAY ** k times the loss, a scalar."""
        batch = distill_batch
        with torch.no_grad():
            hidden_SH = supervised_hidden(self._target[0], batch)
        row_S = rows_of_positions(batch)
        first = next(self.heads.parameters())
        total = first.sum() * 0.0  # a batch may have no position with enough tokens behind it
        for index, (blocks, rows) in enumerate(zip(self.heads.blocks, self.heads.rows, strict=True)):
            from_N, to_N = positions_ahead(row_S, index + 1)
            if len(from_N) == 0:
                continue
            is_low = self.compute_dtype != torch.float32
            with torch.autocast(hidden_SH.device.type, dtype=torch.bfloat16, enabled=is_low):
                own_NH = blocks(hidden_SH[from_N].float())
            assert isinstance(rows, nn.Linear)
            summed = chunked_head_loss(
                own_NH,
                LMHead(rows.weight, rows.bias, 1.0, None),
                self._chunk_loss(batch, hidden_SH, to_N),
                chunk_tokens=self.chunk_tokens,
                compute_dtype=self.compute_dtype,
            )
            total = total + HEAD_DECAY ** (index + 1) * summed
        return total

    def _chunk_loss(self, batch: dict[str, Tensor], hidden_SH: Tensor, to_N: Tensor) -> ChunkLoss:
        tokens_N, target_head = batch["token_rows_S"][to_N], self._target_head
        if target_head is None:
            ids_NK, logp_NK = batch["topk_rows_SK"][to_N], batch["topk_logp_SK"][to_N]

            def cached(logits_CV: Tensor, start: int, end: int) -> Tensor:
                return self.objective.topk(ids_NK[start:end], logp_NK[start:end], logits_CV, tokens_N[start:end])

            return cached
        is_trimmed = self.heads.shape.num_ids < self.heads.shape.vocab_size
        rows = self.heads.vocab_ids_N if is_trimmed else None

        def live(logits_CV: Tensor, start: int, end: int) -> Tensor:
            with torch.no_grad():
                target_CV = target_head.logits(hidden_SH[to_N[start:end]])
            return self.objective.full(target_CV, logits_CV, tokens_N[start:end], rows)

        return live
