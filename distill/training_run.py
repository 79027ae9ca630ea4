"""What happens around the optimiser steps of a training: measuring, checkpoints, budgets, reporting."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from distill.checkpoints import CheckpointStore, Progress
from distill.config import TrainConfig
from distill.dataset import PackedDataset
from distill.own_head import OwnHead
from distill.processes import Processes
from distill.schedule import BudgetClock

AcceptanceOf = Callable[[PreTrainedModel], float]
OnMetrics = Callable[[dict[str, float], int], None]


class TrainingRun(TrainerCallback):
    """Evaluates, keeps the best draft, asks for checkpoints and ends the run with its budget."""

    def __init__(
        self, *, progress: Progress, store: CheckpointStore, clock: BudgetClock, dataset: PackedDataset, train: TrainConfig,
        saved_dtype: torch.dtype, acceptance_of: AcceptanceOf, on_metrics: OnMetrics, own_head: OwnHead | None,
        processes: Processes,
    ) -> None:
        self.progress, self.store, self.clock, self.dataset, self.train = progress, store, clock, dataset, train
        self.saved_dtype, self.acceptance_of, self.processes = saved_dtype, acceptance_of, processes
        self.on_metrics = on_metrics if processes.is_main else lambda metrics, step: None
        self.own_head = own_head
        self.whole: Callable[[], PreTrainedModel | None] = lambda: None
        self.seconds_logged, self.tokens_logged = clock.seconds(), progress.num_supervised_tokens

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if not self.progress.curve:
            self._evaluate()
        self.seconds_logged = self.clock.seconds()

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.agree_on_time()

    def agree_on_time(self) -> None:
        """With a time budget, all processes go by process 0's clock."""
        if self.processes.count > 1 and self.train.max_minutes is not None:
            self.clock.agree_on(self.processes.from_main(self.clock.seconds()))

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.progress.step = state.global_step
        self.progress.num_supervised_tokens += self.dataset.num_tokens_of_step(state.global_step - 1)
        control.should_training_stop |= self.clock.fraction() >= 1.0
        if state.global_step % self.train.eval_every_steps == 0:
            self._evaluate()
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
        self.processes.wait()
        if self.processes.is_main:
            self.store.publish(self.progress)
        self.processes.wait()

    def finish(self) -> None:
        """Evaluate the last weights, if they were not yet, and mark the run complete."""
        self.processes.wait()  # the others' trainers look for checkpoints at their end, and these go now
        if self.progress.curve[-1][0] != self.progress.step:
            self._evaluate()
        self.progress.seconds = self.clock.seconds()
        if self.processes.is_main:
            self.store.finish(self.progress)
        self.processes.wait()

    def _evaluate(self) -> None:
        """Process 0 measures, with no collective inside, while the others wait for its figure."""
        started = self.clock.seconds()
        draft = self.whole()
        step = self.progress.step
        acceptance = self._measure(draft, step) if self.processes.is_main and draft is not None else 0.0
        acceptance = self.processes.from_main(acceptance)
        self.progress.curve.append((step, acceptance))
        self.seconds_logged += self.clock.seconds() - started
        self.on_metrics({"acceptance_rate": acceptance}, step)

    def _measure(self, model: PreTrainedModel, step: int) -> float:
        """Held-out acceptance of the whole draft, which is saved when it is the best so far."""
        bf16 = self.train.autocast_dtype == "bfloat16"
        model.eval()
        # The caller's random draws must not move the training's own, or a resumed run would differ.
        autocast = torch.autocast(model.device.type, torch.bfloat16, enabled=bf16)
        before = self.progress.best
        # A whole copy of a sharded draft has all rows already.
        is_trimmed = self.own_head is not None and not self.processes.shards
        with self.own_head.whole() if self.own_head is not None and is_trimmed else nullcontext():
            with torch.random.fork_rng(), torch.no_grad(), autocast:
                acceptance = float(self.acceptance_of(model))
            if before is None or acceptance > before[1]:
                self.store.save_best(model, step, self.saved_dtype)
        return acceptance
