"""Medusa-1 (arXiv 2401.10774) with soft labels: heads for the tokens after the next one, on a frozen target.

Where the paper trains on the tokens of a text, here head k at position t learns the target's distribution at t + k. It is the
one that the corpus has cached for the token there, so it is conditioned on the true tokens between, which the head
does not see: what the head can learn is its mean over them. The hidden states are computed live, one target forward a batch.
"""

import copy
import hashlib
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import PreTrainedModel

from distill.checkpoints import CheckpointStore, Progress
from distill.config import LossConfig, TrainConfig, refuse_for_medusa
from distill.dataset import PackedDataset
from distill.medusa_loss import MedusaLoss
from distill.objective import Objective
from distill.packed_trainer import PackedTrainer
from distill.preconditions import require_matching_forward
from distill.processes import Processes
from distill.schedule import BudgetClock
from distill.topk import remap_table
from distill.train import TrainResult, require_cached, result_of, rows_digest
from distill.training_run import OnMetrics, TrainingRun
from specdec_runtime.medusa_heads import MedusaHeads


class _HeadsStore(CheckpointStore):
    """Keeps the best heads, not the module around them."""

    def save_best(self, model: MedusaLoss, step: int, dtype: torch.dtype) -> None:
        self.put_best(step, copy.deepcopy(model.heads).to(dtype).save)


def train_medusa(
    heads: MedusaHeads,
    target: PreTrainedModel,
    train_rows: Dataset,
    *,
    loss: LossConfig,
    train: TrainConfig,
    output_dir: Path,
    acceptance_of: Callable[[MedusaHeads], float],
    on_metrics: OnMetrics = lambda metrics, step: None,
) -> TrainResult:
    """Train `heads` in place (in fp32) until a budget is used up; the best ones by `acceptance_of` lie in `best_dir`, in the
    target's dtype, for `load_medusa_heads`.

    Arguments, resuming and errors are those of `distill.train.train_draft`. `loss.teacher=cached` needs no target head;
    `online` runs it on the same hidden states.

    Raises:
        ValueError: heads of another target, or settings of `train` that are for draft models.
    """
    heads.require_target(target)
    refuse_for_medusa(train)
    require_cached(loss, train_rows)
    store = _HeadsStore(Path(output_dir), _describe(heads, train_rows, loss, train))
    if store.result() is not None:
        return result_of(store)
    require_matching_forward(target)
    table = remap_table(heads.vocab_ids_N.tolist(), heads.shape.vocab_size)
    dataset = PackedDataset(train_rows, train, table, with_topk=loss.teacher == "cached")
    model = MedusaLoss(
        heads.float(), target, Objective(loss), teacher=loss.teacher,
        compute_dtype=getattr(torch, train.autocast_dtype), chunk_tokens=train.head_chunk_tokens,
    )
    clock, found = BudgetClock(train.max_minutes), store.latest()
    run = TrainingRun(
        progress=Progress() if found is None else found[1], store=store, clock=clock, dataset=dataset, train=train,
        saved_dtype=target.dtype, acceptance_of=lambda module: acceptance_of(module.heads), on_metrics=on_metrics, own_head=None,
        processes=Processes(),
    )
    run.whole = lambda: model
    trainer = PackedTrainer(
        dataset, train=train, checkpoint_dir=store.checkpoint_dir, clock=clock, callbacks=[run], publish=run.publish,
        model=model, train_dataset=dataset,
    )
    clock.resume_at(run.progress.seconds)
    trainer.train(resume_from_checkpoint=None if found is None else str(found[0]))
    run.finish()
    return result_of(store)


def _describe(heads: MedusaHeads, rows: Dataset, loss: LossConfig, train: TrainConfig) -> dict[str, Any]:
    """What the run is derived from, so that a folder is never resumed for something else."""
    return {
        "rows": rows_digest(rows),
        "loss": asdict(loss),
        "train": asdict(train),
        "heads": asdict(heads.shape),
        "vocab_ids": hashlib.sha256(repr(heads.vocab_ids_N.tolist()).encode()).hexdigest(),
    }
