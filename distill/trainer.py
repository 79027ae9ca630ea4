"""The offline trainer: trl.SFTTrainer with the distillation loss, sized for many small steps.

Legend: T input tokens of a packed batch, S its supervised positions, C positions of one head chunk, H hidden size.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, PreTrainedTokenizerFast, PrinterCallback, Trainer
from trl import SFTConfig, SFTTrainer

from distill.config import LossConfig, TrainConfig
from distill.dataset import PackedDataset
from distill.loss_forward import LossForward
from distill.objective import Objective
from distill.own_head import OwnHead
from distill.processes import Processes
from distill.schedule import BudgetClock, lr_factor
from distill.sharding import WholeCopy, load_state, save_state, shard, shard_teacher
from distill.trainer_settings import fixed_settings

#: In a checkpoint: the folder of weights and optimiser state, and the scheduler's file.
STATE, SCHEDULER = "state", "scheduler.pt"


class DistillTrainer(SFTTrainer):
    """SFTTrainer whose loss compares the draft with the target's cached or live distribution.

    The loss of a micro-batch is its sum over supervised positions divided by the supervised tokens of the whole
    optimiser step, so the gradient does not depend on how the step is split. Weights stay fp32; the forward pass runs in
    `train.autocast_dtype`; softmax and loss are fp32. `vocab_ids` (sorted) trims the head to these rows; with `own_head` the
    draft's head has them already, and is trained.

    With several processes the divisor counts the tokens of all of them. Their checkpoints hold weights and optimiser state in
    parts and can be resumed by any number of processes, under ddp or fsdp (deepspeed writes its own).
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
        self.processes, self.publish = processes or Processes(), publish
        self.packed = dataset
        self.lr_scheduler: Any
        self.train_config = train
        self.clock = clock
        self.compute_dtype = getattr(torch, train.autocast_dtype)
        super().__init__(
            model=draft,
            args=training_arguments(train, dataset, checkpoint_dir),
            train_dataset=dataset.rows,
            data_collator=only_item,
            # SFTTrainer insists on a tokenizer; the corpus is token ids, and none must touch the draft's config.
            processing_class=PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"": 0}))),
            callbacks=list(callbacks),
        )
        self.processing_class = None
        self.remove_callback(PrinterCallback)
        self.loss_is_scaled_for_ga = True
        self.model_accepts_loss_kwargs = True
        _set_embeddings_trainable(draft, embeddings=train.train_embeddings, head=train.train_embeddings or own_head is not None)
        target_head = None
        if target is not None and self.processes.engine == "fsdp":
            target_head = shard_teacher(target, draft.device)
        elif target is not None:
            target = target.to(draft.device)
        self.loss_forward = LossForward(
            draft, target, Objective(loss), vocab_ids, self.compute_dtype, train.head_chunk_tokens,
            train_head=train.train_embeddings or own_head is not None, is_trimmed=own_head is not None,
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

    def compute_loss(
        self, model: torch.nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        """Sum of the losses over the batch's supervised positions / supervised tokens of the optimiser step."""
        assert num_items_in_batch is not None
        assert not return_outputs
        # DDP averages gradients over its processes, while the divisor counts the tokens of all of them.
        total: Tensor = model(distill_batch=inputs)
        loss: Tensor = total * self.accelerator.num_processes / num_items_in_batch
        return loss

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """One micro-batch, forward and backward; a loss that is not finite ends the run before it reaches the weights."""
        loss: Tensor = super().training_step(*args, **kwargs)
        require_finite("loss", loss, self.state.global_step + 1)
        return loss

    def _clip_grad_norm(self, model: torch.nn.Module) -> Any:
        norm = super()._clip_grad_norm(model)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        require_finite("gradient norm", norm, self.state.global_step + 1)
        return norm

    def _get_num_items_in_batch(self, batch_samples: list[dict[str, Tensor]], device: torch.device) -> Tensor:
        num_tokens = torch.tensor(sum(len(batch["supervised_S"]) for batch in batch_samples), device=device)
        if self.args.world_size > 1:
            num_tokens = self.accelerator.gather(num_tokens).sum()
        return num_tokens

    def get_train_dataloader(self) -> Any:
        """The plan's micro-batches in order: the whole run is one pass, which a resumed run continues by skipping."""
        loader = DataLoader(self.packed, batch_size=1, shuffle=False, collate_fn=only_item)
        return self.accelerator.prepare(loader)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Warm-up, then a cosine that ends with the first budget to be reached, steps or minutes."""
        config, clock = self.train_config, self.clock

        def factor(step: int) -> float:
            done = max((step + 1) / num_training_steps, clock.fraction())
            return lr_factor(done, warmup=config.warmup_fraction, floor=config.min_lr_fraction)

        if self.lr_scheduler is None:
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer or self.optimizer, factor)
            self._created_lr_scheduler = True
        return self.lr_scheduler

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Not counted: the estimate walks all parameters at every step."""
        return 0

    def _get_output_dir(self, trial: Any) -> str:
        return str(Path(self.args.output_dir) / "incoming")

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

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        """Write to `incoming`, then let `publish` rename it, so that a kill leaves the last checkpoint whole.

        SFTTrainer would add a model card, which a checkpoint does not need, so Trainer's own method is called.
        """
        Trainer._save_checkpoint(self, model, trial)
        self.publish()


def only_item(items: list[Any]) -> Any:
    """The batch of a loader whose items are whole batches."""
    (item,) = items
    return item


def _set_embeddings_trainable(draft: PreTrainedModel, *, embeddings: bool, head: bool) -> None:
    for layer, trainable in ((draft.get_output_embeddings(), head), (draft.get_input_embeddings(), embeddings)):
        for parameter in layer.parameters():
            parameter.requires_grad_(trainable)


def require_finite(what: str, value: Any, step: int) -> None:
    """Raises FloatingPointError for a loss or gradient norm that is no number."""
    number = float(value)
    if number - number != 0.0:
        raise FloatingPointError(
            f"the {what} is {number} at step {step}: training stopped before the weights were touched; lower "
            "train.learning_rate (or raise train.warmup_fraction) and train again"
        )


def training_arguments(train: TrainConfig, dataset: PackedDataset, checkpoint_dir: Path) -> SFTConfig:
    """TrainingArguments without per-step extras: at a few hundred tokens a step, overhead is a visible share."""
    return SFTConfig(
        output_dir=str(checkpoint_dir),
        per_device_train_batch_size=1,
        gradient_accumulation_steps=train.gradient_accumulation_steps,
        max_steps=dataset.plan.num_steps,
        learning_rate=train.learning_rate,
        remove_unused_columns=False,
        max_length=None,
        dataset_kwargs={"skip_prepare_dataset": True},
        **fixed_settings(train),
    )
