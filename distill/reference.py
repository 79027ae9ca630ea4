"""The reference of token selection: its losses on the training rows, computed once."""

from collections.abc import Sequence

import numpy as np
import torch
from datasets import Dataset
from transformers import PreTrainedModel

from distill.config import LossConfig, TrainConfig
from distill.dataset import PackedDataset
from distill.loss_forward import LossForward
from distill.objective import Objective
from distill.topk import remap_table

ROWS_PER_BATCH = 8


def reference_losses(
    reference: PreTrainedModel,
    rows: Dataset,
    *,
    loss: LossConfig,
    train: TrainConfig,
    target: PreTrainedModel | None = None,
    vocab_ids: Sequence[int] | None = None,
) -> list[np.ndarray]:
    """The loss of `reference` at every supervised position of every row, fp32, in the order of `rows`.

    The arguments are those of the training that will use them (`distill.train.train_draft`), so that the two losses can be
    compared; a row without supervised positions gets an empty array.
    """
    table = remap_table(vocab_ids, reference.get_output_embeddings().weight.shape[0])
    dataset = PackedDataset(rows, train, table, with_topk=loss.teacher == "cached", num_micro=1)
    target = target if loss.teacher == "online" else None
    forward = LossForward(
        reference, target, Objective(loss), vocab_ids, getattr(torch, train.autocast_dtype), train.head_chunk_tokens,
        train_head=False, is_trimmed=False,
    )
    losses = [np.zeros(0, dtype=np.float32) for _ in range(len(rows))]
    reference.eval()
    for start in range(0, len(dataset.usable), ROWS_PER_BATCH):
        indices = dataset.usable[start : start + ROWS_PER_BATCH].tolist()
        batch = {name: value.to(reference.device) for name, value in dataset.pack(indices).items()}
        with torch.no_grad():
            values = forward.position_losses(batch).float().cpu().numpy()
        ends = np.cumsum(dataset.num_kept[indices])
        for index, part in zip(indices, np.split(values, ends[:-1]), strict=True):
            losses[index] = part
    return losses
