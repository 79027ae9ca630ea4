"""Train a draft until a budget is used up, and keep the checkpoint with the best held-out acceptance."""

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from transformers import PreTrainedModel

from distill.checkpoints import CheckpointStore, Progress
from distill.config import LossConfig, TrainConfig
from distill.dataset import PackedDataset
from distill.liger import require_liger
from distill.own_head import OwnHead
from distill.preconditions import require_matching_forward
from distill.processes import Processes
from distill.schedule import BudgetClock
from distill.topk import remap_table
from distill.trainer import DistillTrainer
from distill.training_run import AcceptanceOf, OnMetrics, TrainingRun


@dataclass(frozen=True)
class TrainResult:
    """What a training run gave. `best_dir` is a Hugging Face folder; `curve` holds (step, held-out acceptance)."""

    best_dir: Path
    num_steps: int
    num_supervised_tokens: int
    seconds: float
    best_acceptance: float
    curve: list[tuple[int, float]]


def train_draft(
    draft: PreTrainedModel,
    train_rows: Dataset,
    *,
    loss: LossConfig,
    train: TrainConfig,
    output_dir: Path,
    acceptance_of: AcceptanceOf,
    on_metrics: OnMetrics = lambda metrics, step: None,
    target: PreTrainedModel | None = None,
    vocab_ids: Sequence[int] | None = None,
    train_head: bool = False,
    reference_losses: Sequence[np.ndarray] | None = None,
    processes: Processes | None = None,
) -> TrainResult:
    """Distil into `draft` (trained in place, in fp32) and return where its best version lies.

    `train_rows` has the corpus columns; `vocab_ids` (ascending) trims the head that is trained over; `train_head` gives the
    draft an untied head of its own and trains its rows; `target` is needed for `loss.teacher=online`. `acceptance_of` gives
    the held-out acceptance rate by which the checkpoint is chosen, at the start, every `eval_every_steps` and at the end.
    `on_metrics(metrics, step)` gets `loss`, `learning_rate`, `grad_norm`, `tokens_per_second` (supervised tokens) and, when
    evaluated, `acceptance_rate`.
    `reference_losses` (`distill.reference`), one array per row, are what `train.token_selection` selects by.
    `processes`: those of a launched training, each of which makes this call with the same arguments. Process 0 alone measures,
    writes and reports; `acceptance_of` and `on_metrics` of the others are not called. A sharded draft stays in parts.

    A call that was killed goes on from its last checkpoint when repeated with the same arguments, and for budgets in
    steps or epochs gives the weights of an undisturbed one; a complete one returns its result at once. Raises ValueError
    for settings that cannot work and FloatingPointError when the loss is not finite (the best draft so far stays in
    `output_dir`).
    """
    _check(loss, target, vocab_ids, draft)
    require_cached(loss, train_rows)
    _check_reference(train, reference_losses, train_rows)
    if train.liger:
        require_liger()
    processes = processes or Processes()
    call = _describe(draft, train_rows, loss, train, vocab_ids, train_head)
    store = processes.main_first(lambda: CheckpointStore(Path(output_dir), call))
    if store.result() is not None:
        return result_of(store)
    saved_dtype = draft.dtype
    draft.float()
    table = remap_table(vocab_ids, draft.get_output_embeddings().weight.shape[0])
    dataset = PackedDataset(train_rows, train, table, with_topk=loss.teacher == "cached", num_processes=processes.count)
    dataset.reference_losses = reference_losses
    live_target = target if loss.teacher == "online" else None
    for model in (draft, *([] if live_target is None else [live_target])):
        require_matching_forward(model)
    own_head = OwnHead(draft, vocab_ids) if train_head else None
    clock = BudgetClock(train.max_minutes)
    found = store.latest()
    run = TrainingRun(
        progress=_start(found, processes), store=store, clock=clock, dataset=dataset, train=train, saved_dtype=saved_dtype,
        acceptance_of=acceptance_of, on_metrics=on_metrics, own_head=own_head, processes=processes,
    )
    trainer = DistillTrainer(
        draft, dataset, loss=loss, train=train, checkpoint_dir=store.checkpoint_dir, clock=clock,
        target=live_target, vocab_ids=vocab_ids, own_head=own_head, processes=processes, callbacks=[run],
        publish=run.publish,
    )
    run.whole = trainer.whole
    clock.resume_at(run.progress.seconds)
    run.agree_on_time()
    try:
        trainer.train(resume_from_checkpoint=None if found is None else str(found[0]))
        run.finish()
    finally:
        trainer.loss_forward.uninstall()
        if own_head is not None and not processes.shards:
            own_head.restore()
    return result_of(store)


def trained_result(output_dir: Path) -> TrainResult | None:
    """What a complete call of `train_draft` left in `output_dir`; None when it is not complete."""
    store = CheckpointStore(Path(output_dir), None)
    return None if store.result() is None else result_of(store)


def _start(found: tuple[Path, Progress] | None, processes: Processes) -> Progress:
    """Progress to go on from; raises ValueError where the engine cannot read its checkpoint."""
    progress = Progress() if found is None else found[1]
    wrote, reads = (progress.engine, progress.num_processes), (processes.engine, processes.count)
    if found is not None and wrote != reads and "deepspeed" in (progress.engine, processes.engine):
        raise ValueError(
            f"launch.engine={processes.engine} with {processes.count} processes cannot go on from the checkpoint that "
            f"{progress.num_processes} processes wrote with launch.engine={progress.engine}: DeepSpeed's are for the same number "
            f"only. Launch it as before, or delete {found[0].parent} to train anew"
        )
    progress.engine, progress.num_processes = reads
    return progress


def _check(
    loss: LossConfig, target: PreTrainedModel | None, vocab_ids: Sequence[int] | None, draft: PreTrainedModel
) -> None:
    if loss.teacher == "online" and target is None:
        raise ValueError("loss.teacher='online' needs the target model; pass target=, or choose loss.teacher='cached'")
    if vocab_ids is not None and (len(vocab_ids) == 0 or list(vocab_ids) != sorted(set(vocab_ids))):
        raise ValueError("vocab_ids: give each id once, in ascending order (draft.vocab_shortlist makes such a list)")
    num_ids = draft.get_output_embeddings().weight.shape[0]
    if vocab_ids is not None and not 0 <= vocab_ids[0] <= vocab_ids[-1] < num_ids:
        raise ValueError(f"vocab_ids reaches from {vocab_ids[0]} to {vocab_ids[-1]}: the draft's head has ids 0 to {num_ids - 1}")


def require_cached(loss: LossConfig, rows: Dataset) -> None:
    """Raise ValueError where a loss would be 0 at every position: its target probabilities were not stored."""
    if not loss.needs_cached_probabilities or "topk_ids" not in rows.column_names or not len(rows):
        return
    if not any(rows[0]["topk_ids"]):
        raise ValueError(
            f"loss.teacher=cached with loss.weights={dict(loss.weights)}: the corpus stores none of the target's probabilities "
            "(corpus.topk=0); make one that does, or choose loss.teacher=online or loss=cross_entropy"
        )


def _check_reference(train: TrainConfig, reference_losses: Sequence[np.ndarray] | None, rows: Dataset) -> None:
    if train.token_selection.enabled != (reference_losses is not None):
        raise ValueError(
            f"train.token_selection.keep_fraction={train.token_selection.keep_fraction} and reference_losses go together: give "
            "both (distill.reference.reference_losses makes them), or keep every position with 1"
        )
    assert reference_losses is None or len(reference_losses) == len(rows)


def _describe(
    draft: PreTrainedModel, rows: Dataset, loss: LossConfig, train: TrainConfig, vocab_ids: Sequence[int] | None,
    train_head: bool,
) -> dict[str, Any]:
    """What the run is derived from, so that a folder is never resumed for something else."""
    vocab = None if vocab_ids is None else hashlib.sha256(repr(list(vocab_ids)).encode()).hexdigest()
    shape = {name: value for name, value in draft.config.to_dict().items() if isinstance(value, (int, float))}
    return {
        "rows": rows_digest(rows), "loss": asdict(loss), "train": asdict(train), "vocab_ids": vocab, "draft": shape,
        "train_head": train_head,
    }


def rows_digest(rows: Dataset) -> str:
    """sha256 of the rows' tokens."""
    digest = hashlib.sha256()
    for batch in rows.select_columns(["prompt_token_ids", "response_token_ids"]).with_format("numpy").iter(1024):
        for column in batch.values():
            for tokens in column:
                digest.update(tokens.astype("<i4").tobytes() + b"|")
    return digest.hexdigest()


def result_of(store: CheckpointStore) -> TrainResult:
    """What a complete run left."""
    progress = store.result()
    assert progress is not None
    assert progress.best is not None
    return TrainResult(
        best_dir=store.best_dir(progress.best[0]),
        num_steps=progress.step,
        num_supervised_tokens=progress.num_supervised_tokens,
        seconds=progress.seconds,
        best_acceptance=progress.best[1],
        curve=progress.curve,
    )
