"""What the trainers of all phases are told alike."""

from typing import Any

import torch

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
