"""What the trainers of all phases are told alike."""

from typing import Any

import torch
from transformers import PreTrainedModel

from distill.config import TrainConfig

LOGGING_STEPS = 10


def fixed_settings(train: TrainConfig) -> dict[str, Any]:
    """Arguments of trl's trainers that every phase has: the optimiser's, and what this project does itself (casting, saving,
    measuring, reporting)."""
    return {
        "weight_decay": train.weight_decay,
        "max_grad_norm": train.max_grad_norm,
        "adam_beta2": train.adam_beta2,
        "optim": "adamw_torch_fused",
        "seed": train.seed,
        "bf16": False,  # LossForward casts
        "use_cpu": not torch.cuda.is_available(),
        "gradient_checkpointing": False,
        "logging_steps": LOGGING_STEPS,
        "logging_nan_inf_filter": False,
        "save_strategy": "no",
        "eval_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }


def set_trainable(draft: PreTrainedModel, *, embeddings: bool, head: bool) -> None:
    """Which of the two large matrices are trained; where they are tied, the input embeddings' word counts."""
    for layer, is_trained in ((draft.get_output_embeddings(), head), (draft.get_input_embeddings(), embeddings)):
        layer.requires_grad_(is_trained)
