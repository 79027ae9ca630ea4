"""The on-policy phase: the offline draft trained further on text that it writes itself, kept only if it is accepted more.

Papers disagree on whether that helps a draft (DistillSpec, Zhou et al. 2023, says yes for some tasks; a draft that serves
sees the target's text with a few tokens of its own). So the phase is judged by held-out acceptance, measured by the same
function that chose the offline checkpoint, and its result is dropped unless it is higher.
"""

import hashlib
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback

from distill.checkpoints import CheckpointStore, Progress
from distill.config import LossConfig, TrainConfig
from distill.liger import require_liger
from distill.on_policy_trainer import OnPolicyTrainer
from distill.own_head import OwnHead
from distill.preconditions import require_matching_forward
from distill.schedule import BudgetClock
from distill.training_run import AcceptanceOf, OnMetrics


@dataclass(frozen=True)
class OnPolicyResult:
    """What the phase gave. `best_dir` is its best draft where `kept`, else None: the offline draft stays."""

    kept: bool
    best_dir: Path | None
    offline_acceptance: float
    on_policy_acceptance: float
    num_steps: int
    num_supervised_tokens: int
    seconds: float
    curve: list[tuple[int, float]]


def train_on_policy(
    draft: PreTrainedModel,
    rows: Dataset,
    *,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    loss: LossConfig,
    train: TrainConfig,
    output_dir: Path,
    acceptance_of: AcceptanceOf,
    on_metrics: OnMetrics = lambda metrics, step: None,
    vocab_ids: Sequence[int] | None = None,
    train_head: bool = False,
) -> OnPolicyResult:
    """Train `draft`, the offline phase's result, in place with `train.on_policy`'s budget and the losses of `loss`.

    Arguments are those of `distill.train.train_draft`; the target is live here, since nobody has cached what it says about
    the draft's text. `acceptance_of` is called before the first step, every `eval_every_steps` and at the end. A call that
    was killed starts again from the draft it is given; a complete one returns its result at once.
    """
    assert train.on_policy.enabled
    if train.liger:
        require_liger()
    store = CheckpointStore(Path(output_dir), _describe(draft, len(rows), loss, train, vocab_ids, train_head))
    if store.result() is not None:
        return _result(store)
    saved_dtype = draft.dtype
    draft.float()
    target = target.to(draft.device)
    for model in (draft, target):
        require_matching_forward(model)
    clock = BudgetClock(train.on_policy.max_minutes)
    own_head = OwnHead(draft, vocab_ids) if train_head else None
    run = _Phase(store, clock, train, saved_dtype, acceptance_of, on_metrics, own_head)
    trainer = OnPolicyTrainer(
        draft, rows, target=target, tokenizer=tokenizer, loss=loss, train=train, scratch_dir=store.checkpoint_dir, clock=clock,
        vocab_ids=vocab_ids, own_head=own_head, callbacks=[run],
    )
    run.trainer = trainer
    try:
        trainer.train()
        run.finish(draft)
    finally:
        trainer.loss_forward.uninstall()
        if own_head is not None:
            own_head.restore()
    return _result(store)


class _Phase(TrainerCallback):
    """Measures, keeps the best draft of the phase, and ends it with its budget."""

    def __init__(
        self, store: CheckpointStore, clock: BudgetClock, train: TrainConfig, saved_dtype: torch.dtype,
        acceptance_of: AcceptanceOf, on_metrics: OnMetrics, own_head: OwnHead | None,
    ) -> None:
        self.store, self.clock, self.train, self.saved_dtype = store, clock, train, saved_dtype
        self.acceptance_of, self.on_metrics, self.own_head = acceptance_of, on_metrics, own_head
        self.progress = Progress()
        self.trainer: OnPolicyTrainer | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._evaluate(kwargs["model"])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.progress.step = state.global_step
        control.should_training_stop |= self.clock.fraction() >= 1.0
        if state.global_step % self.train.on_policy.eval_every_steps == 0:
            self._evaluate(kwargs["model"])

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        if logs is not None and "loss" in logs:
            names = ("loss", "learning_rate", "grad_norm")
            self.on_metrics({f"on_policy_{name}": float(logs[name]) for name in names if name in logs}, state.global_step)

    def finish(self, model: PreTrainedModel) -> None:
        """Measure the last weights, if they were not yet, and mark the phase complete."""
        if self.progress.curve[-1][0] != self.progress.step:
            self._evaluate(model)
        assert self.trainer is not None
        self.progress.num_supervised_tokens = self.trainer.num_supervised_tokens
        self.progress.seconds = self.clock.seconds()
        self.store.finish(self.progress)

    def _evaluate(self, model: PreTrainedModel) -> None:
        is_bf16 = self.train.autocast_dtype == "bfloat16"
        model.eval()
        step, before = self.progress.step, self.progress.best
        autocast = torch.autocast(model.device.type, torch.bfloat16, enabled=is_bf16)
        with nullcontext() if self.own_head is None else self.own_head.whole():
            with torch.random.fork_rng(), torch.no_grad(), autocast:
                acceptance = float(self.acceptance_of(model))
            # Step 0 is the offline draft, which lies on disk already.
            if before is not None and acceptance > before[1]:
                self.store.save_best(model, step, self.saved_dtype)
        self.progress.curve.append((step, acceptance))
        self.on_metrics({"on_policy_acceptance_rate": acceptance}, step)


def _describe(
    draft: PreTrainedModel, num_rows: int, loss: LossConfig, train: TrainConfig, vocab_ids: Sequence[int] | None, train_head: bool
) -> dict[str, Any]:
    digest = hashlib.sha256()
    for tensor in draft.state_dict().values():
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return {
        "draft": digest.hexdigest(), "num_rows": num_rows, "loss": asdict(loss), "train": asdict(train),
        "vocab_ids": None if vocab_ids is None else list(vocab_ids), "train_head": train_head,
    }


def _result(store: CheckpointStore) -> OnPolicyResult:
    progress = store.result()
    assert progress is not None
    (_, offline_acceptance), *measured = progress.curve
    best_step, best_acceptance = max(measured, key=lambda point: point[1])
    kept = best_acceptance > offline_acceptance
    return OnPolicyResult(
        kept=kept, best_dir=store.best_dir(best_step) if kept else None, offline_acceptance=offline_acceptance,
        on_policy_acceptance=best_acceptance, num_steps=progress.step,
        num_supervised_tokens=progress.num_supervised_tokens, seconds=progress.seconds, curve=progress.curve,
    )
