"""trl's on-policy loop with this project's loss.

Legend: T input tokens of a packed batch, S its supervised positions, N rows of a trimmed head, V ids of the vocabulary.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from trl import DistillationConfig

from distill.config import LossConfig, TrainConfig
from distill.loss_forward import LossForward
from distill.mixed_text import MixedTextTrainer
from distill.objective import Objective
from distill.own_head import OwnHead
from distill.schedule import BudgetClock, lr_factor
from distill.trainer_settings import fixed_settings, set_trainable

#: Stands for "until the time is up"; the trainer wants a number of steps.
MANY_STEPS = 10**6


class OnPolicyTrainer(MixedTextTrainer):
    """trl's on-policy loop with this project's loss: any of them, on a trimmed head, in chunks, rows packed."""

    def __init__(
        self, draft: PreTrainedModel, rows: Dataset, *, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase,
        loss: LossConfig, train: TrainConfig, scratch_dir: Path, clock: BudgetClock, vocab_ids: Sequence[int] | None,
        own_head: OwnHead | None, callbacks: Sequence[Any],
    ) -> None:
        self.train_config, self.clock, self.own_head = train, clock, own_head
        self.lr_scheduler: Any
        phase = train.on_policy

        def lmbda() -> float:
            done: float = self.done(self.state.global_step)
            return phase.lmbda_start + (phase.lmbda_end - phase.lmbda_start) * done

        self.vocab_ids = None if vocab_ids is None else torch.as_tensor(list(vocab_ids))
        self.num_ids = draft.get_input_embeddings().weight.shape[0]
        super().__init__(
            draft, rows, args=_arguments(train, scratch_dir), tokenizer=tokenizer, lmbda=lmbda,
            max_sequence_tokens=train.max_sequence_tokens, continue_answers=phase.continue_answers, callbacks=callbacks,
        )
        is_head_trained = train.train_embeddings or own_head is not None
        set_trainable(draft, embeddings=train.train_embeddings, head=is_head_trained)
        self.loss_forward = LossForward(
            draft, target, Objective(loss), vocab_ids, getattr(torch, train.autocast_dtype), train.head_chunk_tokens,
            train_head=is_head_trained, is_trimmed=own_head is not None, liger=train.liger,
        )
        self.loss_forward.install()

    def done(self, step: int) -> float:
        """Share of the phase that is over."""
        share: float = max(step / self.args.max_steps, self.clock.fraction())
        return min(1.0, share)

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        """Sum of the losses over the written and the given tokens / their number in the optimiser step."""
        total: Tensor = model(distill_batch=pack_completions(inputs))
        loss: Tensor = total * self.accelerator.num_processes / inputs["num_items_in_batch"]
        return loss

    def write(self, prompt_ids: list[list[int]]) -> list[list[int]]:
        """The draft samples from the very q that it serves with: no mass outside the shortlist."""
        # generate() asks the forward which arguments it takes.
        self.loss_forward.uninstall()
        try:
            with nullcontext() if self.vocab_ids is None else self._shortlist_head(self.vocab_ids):
                return super().write(prompt_ids)
        finally:
            self.loss_forward.install()

    @contextmanager
    def _shortlist_head(self, vocab_ids: Tensor) -> Iterator[None]:
        draft = self.loss_forward.draft
        before = draft.get_output_embeddings()
        draft.set_output_embeddings(_ShortlistHead(before, vocab_ids, self.num_ids, is_trimmed=self.own_head is not None))
        try:
            yield
        finally:
            draft.set_output_embeddings(before)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Warm-up, then a cosine that ends with the phase."""
        config = self.train_config

        def factor(step: int) -> float:
            return lr_factor(self.done(step + 1), warmup=config.warmup_fraction, floor=config.min_lr_fraction)

        if self.lr_scheduler is None:
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer or self.optimizer, factor)
            self._created_lr_scheduler = True
        return self.lr_scheduler


class _ShortlistHead(nn.Module):
    """Logits over all V ids, -inf outside the shortlist."""

    def __init__(self, head: nn.Linear, ids_N: Tensor, num_ids: int, *, is_trimmed: bool) -> None:
        super().__init__()
        weight, bias = head.weight.detach(), getattr(head, "bias", None)
        self.ids_N, self.num_ids = ids_N.to(weight.device), num_ids
        self.weight_NH = weight if is_trimmed else weight[self.ids_N]
        self.bias_N = bias if bias is None or is_trimmed else bias[self.ids_N]

    def forward(self, hidden: Tensor) -> Tensor:
        scores = nn.functional.linear(hidden.to(self.weight_NH.dtype), self.weight_NH, self.bias_N)
        logits = scores.new_full((*scores.shape[:-1], self.num_ids), -torch.inf)
        logits[..., self.ids_N] = scores
        return logits


def pack_completions(inputs: dict[str, Any]) -> dict[str, Tensor]:
    """trl's padded prompts and completions as one packed batch, whose supervised positions are exactly the completions'.

    Masks tell what is padding, never a token id: a final EOS is trained on though it is the pad token. There are no labels:
    what the draft wrote is not what the target would have, and the live target says at each position what it expects.
    """
    tokens, positions, supervised = [], [], []
    num_before = 0
    for row in range(len(inputs["prompt_ids"])):
        prompt = inputs["prompt_ids"][row][inputs["prompt_mask"][row].bool()]
        completion = inputs["completion_ids"][row][inputs["completion_mask"][row].bool()]
        line = torch.cat([prompt, completion[:-1]])
        tokens.append(line)
        positions.append(torch.arange(len(line), device=line.device))
        supervised.append(positions[-1][len(prompt) - 1 :] + num_before)
        num_before += len(line)
    return {
        "input_ids": torch.cat(tokens)[None],
        "position_ids": torch.cat(positions)[None],
        "supervised_S": torch.cat(supervised),
    }


def _arguments(train: TrainConfig, scratch_dir: Path) -> DistillationConfig:
    phase = train.on_policy
    return DistillationConfig(
        output_dir=str(scratch_dir),
        per_device_train_batch_size=phase.rows_per_step,
        max_steps=phase.max_steps or MANY_STEPS,
        learning_rate=phase.learning_rate,
        max_completion_length=phase.max_new_tokens,
        temperature=phase.temperature,
        **fixed_settings(train),
    )
