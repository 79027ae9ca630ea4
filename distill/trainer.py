"""The offline trainer: trl.SFTTrainer with the distillation loss, sized for many small steps.

Legend: T input tokens of a packed batch, S its supervised positions, C positions of one head chunk, H hidden size.
"""

import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, PreTrainedTokenizerFast, PrinterCallback, Trainer
from trl import SFTConfig, SFTTrainer

from distill.config import LossConfig, TrainConfig
from distill.dataset import PackedDataset
from distill.head import LMHead, chunked_head_loss
from distill.objective import Objective
from distill.packed_attention import supervised_hidden
from distill.schedule import BudgetClock, lr_factor

LOGGING_STEPS = 10


class DistillTrainer(SFTTrainer):
    """SFTTrainer whose loss compares the draft with the target's cached or live distribution.

    The loss of a micro-batch is its sum over supervised positions divided by the supervised tokens of the whole
    optimiser step, so the gradient does not depend on how the step is split. Weights stay fp32; the forward pass runs in
    `train.autocast_dtype`; softmax and loss are fp32. `vocab_ids` (sorted) trims the head to these rows.
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
        callbacks: Sequence[Any] = (),
        publish: Callable[[], None] = lambda: None,
    ) -> None:
        self.publish = publish
        self.packed = dataset
        self.lr_scheduler: Any
        self.train_config = train
        self.clock = clock
        self.compute_dtype = getattr(torch, train.autocast_dtype)
        super().__init__(
            model=draft,
            args=_arguments(train, dataset, checkpoint_dir),
            train_dataset=dataset.rows,
            data_collator=_only_item,
            # SFTTrainer insists on a tokenizer; the corpus is token ids, and none must touch the draft's config.
            processing_class=PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"": 0}))),
            callbacks=list(callbacks),
        )
        self.processing_class = None
        self.remove_callback(PrinterCallback)
        self.loss_is_scaled_for_ga = True
        self.model_accepts_loss_kwargs = True
        _set_embeddings_trainable(draft, train.train_embeddings)
        target = None if target is None else target.to(draft.device)
        self.loss_forward = _LossForward(
            draft, target, Objective(loss), vocab_ids, self.compute_dtype, train.head_chunk_tokens, train.train_embeddings
        )
        self.loss_forward.install()

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


class _LossForward:
    """The draft's forward with a second entry, `model(distill_batch=...)`, that returns the summed loss.

    It goes through the model's own forward so that DDP and FSDP wrappers see it; any other call is unchanged.
    """

    def __init__(
        self, draft: PreTrainedModel, target: PreTrainedModel | None, objective: Objective,
        vocab_ids: Sequence[int] | None, compute_dtype: torch.dtype, chunk_tokens: int, train_head: bool,
    ) -> None:
        self.draft, self.target, self.objective = draft, target, objective
        self.vocab_ids = None if vocab_ids is None else list(vocab_ids)
        self.rows = None if vocab_ids is None else torch.as_tensor(self.vocab_ids, device=draft.device)
        self.compute_dtype, self.chunk_tokens = compute_dtype, chunk_tokens
        self.frozen_head = None if train_head else LMHead.of(draft, self.vocab_ids).to(compute_dtype)
        self.target_head = None if target is None else LMHead.of(target)

    def install(self) -> None:
        """Put the second entry in place of the patch that SFTTrainer made."""
        self.uninstall()
        plain: Callable[..., Any] = self.draft.forward

        def forward(model: PreTrainedModel, *args: Any, distill_batch: dict[str, Tensor] | None = None, **kwargs: Any) -> Any:
            return plain(*args, **kwargs) if distill_batch is None else self.summed_loss(distill_batch)

        self.draft.forward = types.MethodType(forward, self.draft)

    def uninstall(self) -> None:
        """Give the draft its own forward back."""
        self.draft.__dict__.pop("forward", None)

    def summed_loss(self, batch: dict[str, Tensor]) -> Tensor:
        """Sum over the batch's S supervised positions, a scalar."""
        autocast = self.compute_dtype != torch.float32
        with torch.autocast(self.draft.device.type, dtype=torch.bfloat16, enabled=autocast):
            hidden_SH = supervised_hidden(self.draft, batch)
        head = self.frozen_head or LMHead.of(self.draft, self.vocab_ids)
        chunk_loss = self._cached_loss(batch) if self.target is None else self._live_loss(batch)
        return chunked_head_loss(
            hidden_SH, head, chunk_loss, chunk_tokens=self.chunk_tokens, compute_dtype=self.compute_dtype
        )

    def _cached_loss(self, batch: dict[str, Tensor]) -> Callable[[Tensor, int, int], Tensor]:
        ids_SK, logp_SK, tokens_S = batch["topk_rows_SK"], batch["topk_logp_SK"], batch["token_rows_S"]

        def chunk_loss(logits_CV: Tensor, start: int, end: int) -> Tensor:
            return self.objective.topk(ids_SK[start:end], logp_SK[start:end], logits_CV, tokens_S[start:end])

        return chunk_loss

    def _live_loss(self, batch: dict[str, Tensor]) -> Callable[[Tensor, int, int], Tensor]:
        assert self.target is not None
        assert self.target_head is not None
        target_head, tokens_S = self.target_head, batch["token_rows_S"]
        with torch.no_grad():
            target_SH = supervised_hidden(self.target, batch)

        def chunk_loss(logits_CV: Tensor, start: int, end: int) -> Tensor:
            with torch.no_grad():
                raw = target_head.project(target_SH[start:end], target_head.weight_VH.dtype)
                target_CV = target_head.finish(raw)
            return self.objective.full(target_CV, logits_CV, tokens_S[start:end], self.rows)

        return chunk_loss


def _only_item(items: list[Any]) -> Any:
    (item,) = items
    return item


def _set_embeddings_trainable(draft: PreTrainedModel, trainable: bool) -> None:
    for layer in (draft.get_input_embeddings(), draft.get_output_embeddings()):
        for parameter in layer.parameters():
            parameter.requires_grad_(trainable)


def _require_finite(what: str, value: Any, step: int) -> None:
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
        weight_decay=train.weight_decay,
        max_grad_norm=train.max_grad_norm,
        adam_beta2=train.adam_beta2,
        optim="adamw_torch_fused",
        seed=train.seed,
        bf16=False,
        use_cpu=not torch.cuda.is_available(),
        gradient_checkpointing=False,
        logging_steps=LOGGING_STEPS,
        logging_nan_inf_filter=False,
        save_strategy="no",
        eval_strategy="no",
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_pin_memory=False,
        max_length=None,
        dataset_kwargs={"skip_prepare_dataset": True},
    )
