"""What the offline trainers share: planned micro-batches, the loss per step, the budget's schedule, whole checkpoints.

Legend: S supervised positions of a packed batch.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from transformers import PrinterCallback, Trainer
from trl import SFTConfig

from distill.config import TrainConfig
from distill.dataset import PackedDataset
from distill.schedule import BudgetClock, lr_factor
from distill.trainer_settings import fixed_settings


class PackedTrainer(Trainer):
    """Trainer over a `PackedDataset`, of a model whose forward takes `distill_batch` and returns the batch's summed loss.

    The loss of a micro-batch is that sum divided by the supervised tokens of the whole optimiser step, all processes
    together, so the gradient does not depend on how the step is split. It stands alone, or before another Trainer among a
    class's bases, which then gets the `settings`.

    Args:
        publish: called when a checkpoint is written, to put it in the place of the last one.
    """

    def __init__(
        self,
        dataset: PackedDataset,
        *,
        train: TrainConfig,
        checkpoint_dir: Path,
        clock: BudgetClock,
        callbacks: Sequence[Any],
        publish: Callable[[], None],
        **settings: Any,
    ) -> None:
        self.packed, self.train_config, self.clock, self.publish = dataset, train, clock, publish
        self.lr_scheduler: Any
        super().__init__(
            args=_arguments(train, dataset, checkpoint_dir),
            data_collator=_only_item,
            callbacks=list(callbacks),
            **settings,
        )
        self.remove_callback(PrinterCallback)
        self.loss_is_scaled_for_ga = True
        self.model_accepts_loss_kwargs = True

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
        _require_finite("loss", loss, self.state.global_step + 1)
        return loss

    def _clip_grad_norm(self, model: torch.nn.Module) -> Any:
        norm = super()._clip_grad_norm(model)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        _require_finite("gradient norm", norm, self.state.global_step + 1)
        return norm

    def _get_num_items_in_batch(self, batch_samples: list[dict[str, Tensor]], device: torch.device) -> Tensor:
        num_tokens = torch.tensor(sum(len(batch["supervised_S"]) for batch in batch_samples), device=device)
        if self.args.world_size > 1:
            num_tokens = self.accelerator.gather(num_tokens).sum()
        return num_tokens

    def get_train_dataloader(self) -> Any:
        """The plan's micro-batches in order: the whole run is one pass, which a resumed run continues by skipping."""
        loader = DataLoader(self.packed, batch_size=1, shuffle=False, collate_fn=_only_item)
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

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        """Write to `incoming`, then let `publish` rename it, so that a kill leaves the last checkpoint whole.

        SFTTrainer would add a model card, which a checkpoint does not need, so Trainer's own method is called.
        """
        Trainer._save_checkpoint(self, model, trial)
        self.publish()


def _only_item(items: list[Any]) -> Any:
    """The batch of a loader whose items are whole batches."""
    (item,) = items
    return item


def _require_finite(what: str, value: Any, step: int) -> None:
    """Raises FloatingPointError for a loss or gradient norm that is no number."""
    number = float(value)
    if number - number != 0.0:
        raise FloatingPointError(
            f"the {what} is {number} at step {step}: training stopped before the weights were touched; lower "
            "train.learning_rate (or raise train.warmup_fraction) and train again"
        )


def _arguments(train: TrainConfig, dataset: PackedDataset, checkpoint_dir: Path) -> SFTConfig:
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
