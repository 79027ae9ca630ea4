"""Train a draft until a budget is used up, and keep the checkpoint with the best held-out acceptance."""

import hashlib
import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from distill.checkpoints import CheckpointStore, Progress
from distill.config import LossConfig, TrainConfig
from distill.dataset import PackedDataset
from distill.liger import require_liger
from distill.own_head import OwnHead
from distill.preconditions import require_matching_forward
from distill.schedule import BudgetClock
from distill.topk import remap_table
from distill.trainer import DistillTrainer

logger = logging.getLogger(__name__)

AcceptanceOf = Callable[[PreTrainedModel], float]
OnMetrics = Callable[[dict[str, float], int], None]


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
) -> TrainResult:
    """Distil into `draft` (trained in place, in fp32) and return where its best version lies.

    `train_rows` has the corpus columns; `vocab_ids` (ascending) trims the head that is trained over; `train_head` gives the
    draft an untied head of its own and trains its rows; `target` is needed for `loss.teacher=online`. `acceptance_of` gives
    the held-out acceptance rate by which the checkpoint is chosen, at the start, every `eval_every_steps` and at the end.
    `on_metrics(metrics, step)` gets `loss`, `learning_rate`, `grad_norm`, `tokens_per_second` (supervised tokens) and, when
    evaluated, `acceptance_rate`.
    `reference_losses` (`distill.reference`), one array per row, are what `train.token_selection` selects by.

    A call that was killed goes on from its last checkpoint when repeated with the same arguments, and for budgets in
    steps or epochs gives the weights of an undisturbed one; a complete one returns its result at once. Raises ValueError
    for settings that cannot work and FloatingPointError when the loss is not finite (the best draft so far stays in
    `output_dir`).
    """
    _check(loss, target, vocab_ids, draft)
    _check_reference(train, reference_losses, train_rows)
    if train.liger:
        require_liger()
    store = CheckpointStore(Path(output_dir), _describe(draft, train_rows, loss, train, vocab_ids, train_head))
    if store.result() is not None:
        return _result(store)
    saved_dtype = draft.dtype
    draft.float()
    table = _head_rows(draft, vocab_ids)
    dataset = PackedDataset(train_rows, train, table, with_topk=loss.teacher == "cached")
    dataset.reference_losses = reference_losses
    live_target = target if loss.teacher == "online" else None
    for model in (draft, *([] if live_target is None else [live_target])):
        require_matching_forward(model)
    own_head = OwnHead(draft, vocab_ids) if train_head else None
    clock = BudgetClock(train.max_minutes)
    found = store.latest()
    run = _Run(
        progress=Progress() if found is None else found[1], store=store, clock=clock, dataset=dataset, train=train,
        saved_dtype=saved_dtype, acceptance_of=acceptance_of, on_metrics=on_metrics, own_head=own_head,
    )
    trainer = DistillTrainer(
        draft, dataset, loss=loss, train=train, checkpoint_dir=store.checkpoint_dir, clock=clock,
        target=live_target, vocab_ids=vocab_ids, own_head=own_head, callbacks=[run], publish=run.publish,
    )
    clock.resume_at(run.progress.seconds)
    try:
        trainer.train(resume_from_checkpoint=None if found is None else str(found[0]))
        run.finish(draft)
    finally:
        trainer.loss_forward.uninstall()
        if own_head is not None:
            own_head.restore()
    return _result(store)


class _Run(TrainerCallback):
    """Evaluates, keeps the best draft, asks for checkpoints and ends the run with its budget."""

    def __init__(
        self, *, progress: Progress, store: CheckpointStore, clock: BudgetClock, dataset: PackedDataset, train: TrainConfig,
        saved_dtype: torch.dtype, acceptance_of: AcceptanceOf, on_metrics: OnMetrics, own_head: OwnHead | None,
    ) -> None:
        self.progress, self.store, self.clock, self.dataset, self.train = progress, store, clock, dataset, train
        self.saved_dtype, self.acceptance_of, self.on_metrics = saved_dtype, acceptance_of, on_metrics
        self.own_head = own_head
        self.seconds_logged, self.tokens_logged = clock.seconds(), progress.num_supervised_tokens

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if not self.progress.curve:
            self._evaluate(kwargs["model"])
        self.seconds_logged = self.clock.seconds()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.progress.step = state.global_step
        self.progress.num_supervised_tokens += self.dataset.num_tokens_of_step(state.global_step - 1)
        control.should_training_stop |= self.clock.fraction() >= 1.0
        if state.global_step % self.train.eval_every_steps == 0:
            self._evaluate(kwargs["model"])
        if state.global_step % self.train.checkpoint_every_steps == 0:
            control.should_save = True

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        if logs is None or "loss" not in logs:
            return
        seconds, tokens = self.clock.seconds(), self.progress.num_supervised_tokens
        metrics: dict[str, float] = {name: float(logs[name]) for name in ("loss", "learning_rate", "grad_norm") if name in logs}
        metrics["tokens_per_second"] = (tokens - self.tokens_logged) / max(seconds - self.seconds_logged, 1e-9)
        self.seconds_logged, self.tokens_logged = seconds, tokens
        self.on_metrics(metrics, state.global_step)

    def publish(self) -> None:
        """Called when the trainer has written a checkpoint."""
        self.progress.seconds = self.clock.seconds()
        self.store.publish(self.progress)

    def finish(self, model: PreTrainedModel) -> None:
        """Evaluate the last weights, if they were not yet, and mark the run complete."""
        if self.progress.curve[-1][0] != self.progress.step:
            self._evaluate(model)
        self.progress.seconds = self.clock.seconds()
        self.store.finish(self.progress)

    def _evaluate(self, model: PreTrainedModel) -> None:
        started = self.clock.seconds()
        bf16 = self.train.autocast_dtype == "bfloat16"
        model.eval()
        # The caller's random draws must not move the training's own, or a resumed run would differ.
        autocast = torch.autocast(model.device.type, torch.bfloat16, enabled=bf16)
        step, before = self.progress.step, self.progress.best
        with nullcontext() if self.own_head is None else self.own_head.whole():
            with torch.random.fork_rng(), torch.no_grad(), autocast:
                acceptance = float(self.acceptance_of(model))
            if before is None or acceptance > before[1]:
                self.store.save_best(model, step, self.saved_dtype)
        self.progress.curve.append((step, acceptance))
        self.seconds_logged += self.clock.seconds() - started
        self.on_metrics({"acceptance_rate": acceptance}, step)


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


def _check_reference(train: TrainConfig, reference_losses: Sequence[np.ndarray] | None, rows: Dataset) -> None:
    if train.token_selection.enabled != (reference_losses is not None):
        raise ValueError(
            f"train.token_selection.keep_fraction={train.token_selection.keep_fraction} and reference_losses go together: give "
            "both (distill.reference.reference_losses makes them), or keep every position with 1"
        )
    assert reference_losses is None or len(reference_losses) == len(rows)


def _head_rows(draft: PreTrainedModel, vocab_ids: Sequence[int] | None) -> torch.Tensor:
    num_ids = draft.get_output_embeddings().weight.shape[0]
    return remap_table(range(num_ids) if vocab_ids is None else vocab_ids, num_ids)


def _describe(
    draft: PreTrainedModel, rows: Dataset, loss: LossConfig, train: TrainConfig, vocab_ids: Sequence[int] | None,
    train_head: bool,
) -> dict[str, Any]:
    """What the run is derived from, so that a folder is never resumed for something else."""
    digest = hashlib.sha256()
    for batch in rows.select_columns(["prompt_token_ids", "response_token_ids"]).with_format("numpy").iter(1024):
        for column in batch.values():
            for tokens in column:
                digest.update(tokens.astype("<i4").tobytes() + b"|")
    vocab = None if vocab_ids is None else hashlib.sha256(repr(list(vocab_ids)).encode()).hexdigest()
    shape = {name: value for name, value in draft.config.to_dict().items() if isinstance(value, (int, float))}
    return {
        "rows": digest.hexdigest(), "loss": asdict(loss), "train": asdict(train), "vocab_ids": vocab, "draft": shape,
        "train_head": train_head,
    }


def _result(store: CheckpointStore) -> TrainResult:
    values = store.result()
    assert values is not None
    progress = Progress(**{**values, "curve": [(step, acceptance) for step, acceptance in values["curve"]]})
    assert progress.best is not None
    return TrainResult(
        best_dir=store.best_dir(progress.best[0]),
        num_steps=progress.step,
        num_supervised_tokens=progress.num_supervised_tokens,
        seconds=progress.seconds,
        best_acceptance=progress.best[1],
        curve=progress.curve,
    )
