"""A call of train_draft on tiny models, shared by the training tests."""

from collections.abc import Callable
from pathlib import Path

import torch
from datasets import Dataset
from transformers import LlamaForCausalLM, PreTrainedModel

from distill.config import LossConfig, TrainConfig
from distill.train import TrainResult, train_draft

MakeModel = Callable[..., LlamaForCausalLM]
MakeRows = Callable[..., Dataset]
FAST = {"autocast_dtype": "float32", "tokens_per_step": 30, "eval_every_steps": 4, "checkpoint_every_steps": 3}


class Killed(BaseException):
    """Stands for SIGKILL: not an Exception, so nothing may handle it."""


def train(
    draft: PreTrainedModel, rows: Dataset, output_dir: Path, *, loss: LossConfig | None = None, curve: list[float] | None = None,
    target: PreTrainedModel | None = None, vocab_ids: list[int] | None = None, train_head: bool = False, on_metrics=None,
    acceptance_of: Callable[[PreTrainedModel], float] | None = None, reference_losses=None, processes=None, **settings: object,
) -> TrainResult:
    """`curve` is what successive evaluations give; the last value stays."""
    values = list(curve or [0.0])
    return train_draft(
        draft, rows, loss=loss or LossConfig(), train=TrainConfig(**{**FAST, **settings}), output_dir=output_dir, target=target,
        vocab_ids=vocab_ids, train_head=train_head, reference_losses=reference_losses,
        acceptance_of=acceptance_of or (lambda model: values.pop(0) if len(values) > 1 else values[0]),
        processes=processes, on_metrics=on_metrics or (lambda metrics, step: None),
    )


def weights(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    for name, value in left.items():
        assert torch.equal(value, right[name]), name
