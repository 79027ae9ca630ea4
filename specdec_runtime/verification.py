"""The target's forward over what was proposed, and what is left of it in the caches.

Shape legend: B rows, G proposals (a chain, or the nodes of a tree), T = G + 1, D depth of a tree, V vocabulary, H hidden size.
"""

from collections.abc import Sequence
from typing import Optional

import torch
from torch import Tensor

from specdec_runtime.batch import Batch
from specdec_runtime.forward import ModelRunner
from specdec_runtime.layout import block_layout
from specdec_runtime.proposal import Proposal
from specdec_runtime.scheduler import Row


def block_logits(target: ModelRunner, batch: Batch, proposal: Optional[Proposal], *, width: int) -> Tensor:
    """Logits [B, T, V] after the last committed token and each proposal; the block is padded to `width` tokens per row."""
    last_B1 = batch.column([row.token_ids[-1] for row in batch.rows])[:, None]
    parts = [last_B1] if proposal is None else [last_B1, proposal.ids_BG]
    num_used = 1 if proposal is None else 1 + proposal.ids_BG.shape[1]
    parts.append(last_B1.expand(-1, width - num_used))
    starts = [len(row.token_ids) - 1 for row in batch.rows]
    layout = None
    if proposal is not None and proposal.tree is not None:
        layout = block_layout(proposal.tree, target.device)
    logits = target.step(
        torch.cat(parts, dim=1), batch.column(starts), num_cached=max(starts) + width, layout=layout
    )
    return logits[:, :num_used]


def keep_hidden(target: ModelRunner, rows: Sequence[Row], positions_B: Tensor) -> None:
    """Gives each row the target's last hidden state at a position of the block that was just verified."""
    assert target.hidden_BLH is not None
    hidden_BH = target.hidden_BLH[torch.arange(len(rows), device=target.device), positions_B]
    for row, hidden_H in zip(rows, hidden_BH.unbind(0), strict=True):
        row.hidden_H = hidden_H


def last_accepted(batch: Batch, num_accepted: Sequence[int], path_BD: Optional[Tensor]) -> Tensor:
    """[B]: position in the block of the last token that stands; 0, the root, when no proposal does."""
    num_accepted_B = batch.column(num_accepted)
    if path_BD is None:
        return num_accepted_B
    node_B1 = path_BD.gather(1, (num_accepted_B - 1).clamp(min=0)[:, None])
    return node_B1.squeeze(1) + 1  # a path that is empty is -1


def keep_path(runner: ModelRunner, batch: Batch, path_BD: Tensor) -> None:
    """Moves the keys and values of accepted nodes to where committed tokens have theirs; before the rows commit them."""
    assert runner.cache is not None
    runner.cache.keep_path(batch.column([len(row.token_ids) - 1 for row in batch.rows]), path_BD)
