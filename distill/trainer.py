"""The offline trainer of draft models: trl.SFTTrainer with the distillation loss, on one process or several."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from trl import SFTTrainer

from distill.config import LossConfig, TrainConfig
from distill.dataset import PackedDataset
from distill.loss_forward import LossForward
from distill.objective import Objective
from distill.own_head import OwnHead
from distill.packed_trainer import PackedTrainer
from distill.processes import Processes
from distill.schedule import BudgetClock
from distill.sharding import WholeCopy, load_state, save_state, shard, shard_teacher
from distill.trainer_settings import set_trainable

#: In a checkpoint: the folder of weights and optimiser state, and the scheduler's file.
STATE, SCHEDULER = "state", "scheduler.pt"


class DistillTrainer(PackedTrainer, SFTTrainer):
    """SFTTrainer whose loss compares the draft with the target's cached or live distribution.

    Weights stay fp32; the forward pass runs in `train.autocast_dtype`; softmax and loss are fp32. `vocab_ids` (sorted) trims
    the head to these rows; with `own_head` the draft's head has them already, and is trained.

    Checkpoints of several processes hold weights and optimiser state in parts, and can be resumed by any number of
    processes, under ddp or fsdp (deepspeed writes its own).
    """

    def __init__(
        self,
        draft: PreTrainedModel,
        dataset: PackedDataset,
        *,
        loss: LossConfig,
        train: TrainConfig,
        checkpoint_dir: Path,
        clock: BudgetClock,
        target: PreTrainedModel | None = None,
        vocab_ids: Sequence[int] | None = None,
        own_head: OwnHead | None = None,
        processes: Processes | None = None,
        callbacks: Sequence[Any] = (),
        publish: Callable[[], None] = lambda: None,
    ) -> None:
        self.processes = processes or Processes()
        super().__init__(
            dataset,
            train=train,
            checkpoint_dir=checkpoint_dir,
            clock=clock,
            callbacks=callbacks,
            publish=publish,
            model=draft,
            train_dataset=dataset.rows,
            # SFTTrainer insists on a tokenizer; the corpus is token ids, and none must touch the draft's config.
            processing_class=PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"": 0}))),
        )
        self.processing_class = None
        is_head_trained = train.train_embeddings or own_head is not None
        set_trainable(draft, embeddings=train.train_embeddings, head=is_head_trained)
        target_head = None
        if target is not None and self.processes.engine == "fsdp":
            target_head = shard_teacher(target, draft.device)
        elif target is not None:
            target = target.to(draft.device)
        self.loss_forward = LossForward(
            draft, target, Objective(loss), vocab_ids, getattr(torch, train.autocast_dtype), train.head_chunk_tokens,
            train_head=is_head_trained, is_trimmed=own_head is not None,
            keep_fraction=train.token_selection.keep_fraction, liger=train.liger, target_head=target_head,
        )
        self.loss_forward.install()
        self.whole_copy = WholeCopy(draft, own_head)
        if self.processes.engine == "fsdp":
            shard(draft)
            # What Transformers calls a model that comes sharded: nothing shall wrap it, or move it, any more.
            self.is_distributed_loading_by_transformers = True

    def whole(self) -> PreTrainedModel | None:
        """The draft as it is now, whole, in process 0. All must call it: what is sharded is gathered."""
        draft: PreTrainedModel | None = self.model
        if not self.processes.shards:
            return draft
        state = self.accelerator.get_state_dict(self.model_wrapped) if self.is_deepspeed_enabled else None
        return self.whole_copy.gather(state)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Nothing: a checkpoint's weights lie beside the optimiser's state."""

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.is_deepspeed_enabled:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        save_state(Path(output_dir) / STATE, self.model, self.optimizer.optimizer)
        if self.processes.is_main:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: torch.nn.Module | None = None) -> None:
        """Nothing yet: weights are read with the optimiser's state, when both are where they shall be."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or self.is_deepspeed_enabled:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        if not (Path(checkpoint) / STATE).is_dir():
            raise ValueError(f"{checkpoint} was written by another version of this program: delete it to train anew")
        load_state(Path(checkpoint) / STATE, self.model, self.optimizer.optimizer)
        self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / SCHEDULER, weights_only=True))
