"""The target's forward over what was proposed.

Shape legend: B rows, G proposed positions, T = G + 1, V vocabulary.
"""

from typing import Optional

import torch
from torch import Tensor

from specdec_runtime.batch import Batch
from specdec_runtime.forward import ModelRunner
from specdec_runtime.proposal import Proposal


def chain_logits(target: ModelRunner, batch: Batch, proposal: Optional[Proposal], *, width: int) -> Tensor:
    """Logits [B, T, V] after the last committed token and each proposal; the block is padded to `width` tokens per row."""
    last_B1 = batch.column([row.token_ids[-1] for row in batch.rows])[:, None]
    parts = [last_B1] if proposal is None else [last_B1, proposal.ids_BG]
    num_used = 1 if proposal is None else 1 + proposal.ids_BG.shape[1]
    parts.append(last_B1.expand(-1, width - num_used))
    starts = [len(row.token_ids) - 1 for row in batch.rows]
    logits = target.step(torch.cat(parts, dim=1), batch.column(starts), num_cached=max(starts) + width)
    return logits[:, :num_used]
