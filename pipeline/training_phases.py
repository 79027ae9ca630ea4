"""The phases of a training: a reference for token selection, the offline phase, and the on-policy phase after it."""

import copy
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from transformers import PreTrainedModel

from distill.config import OnPolicyConfig, TokenSelectionConfig
from distill.on_policy import train_on_policy
from distill.reference import reference_losses
from distill.train import TrainResult, train_draft
from pipeline.context import StageContext, load_target
from pipeline.models import load_causal_lm, load_tokenizer

#: Folders of the phases beside the offline one's, in the stage's folder while it works.
REFERENCE, ON_POLICY = "reference", "on_policy"


@dataclass(frozen=True)
class Trained:
    """`best_dir` holds the draft of the highest held-out acceptance; `record` says what each phase gave."""

    best_dir: Path
    offline: TrainResult
    record: dict[str, Any]


def train_in_phases(
    context: StageContext,
    draft: PreTrainedModel,
    rows: Dataset,
    *,
    target: PreTrainedModel | None,
    vocab_ids: list[int] | None,
    acceptance_of: Callable[[PreTrainedModel], float],
) -> Trained:
    """Train `draft` in place on `rows`. A call that was killed goes on with the phase that it was in.

    `target` is for `loss.teacher=online`. Without it the offline phase has no target in memory, and the on-policy phase
    loads one when its turn comes.
    """
    config, train, trust = context.config, context.config.train, context.target.trust_remote_code
    common: dict[str, Any] = {
        "loss": config.loss, "acceptance_of": acceptance_of, "vocab_ids": vocab_ids, "train_head": config.draft.has_own_head,
    }
    losses = _reference_losses(context, draft, rows, target, common) if train.token_selection.enabled else None
    offline = train_draft(
        draft, rows, train=train, output_dir=context.work_dir, target=target, reference_losses=losses,
        on_metrics=context.tracker.log_metrics, **common,
    )
    record: dict[str, Any] = {**asdict(offline), "on_policy": None, "launch": None}
    if not train.on_policy.enabled:
        return Trained(offline.best_dir, offline, record)
    result = train_on_policy(
        load_causal_lm(str(offline.best_dir), "float32", trust, field="draft"), rows,
        target=load_target(context) if target is None else target, tokenizer=load_tokenizer(context.target.path, trust),
        train=train, output_dir=context.work_dir / ON_POLICY,
        on_metrics=context.tracker.log_metrics, **common,
    )
    record["on_policy"] = {name: value for name, value in asdict(result).items() if name != "best_dir"}
    record["seconds"] = offline.seconds + result.seconds
    record["num_supervised_tokens"] = offline.num_supervised_tokens + result.num_supervised_tokens
    record["best_acceptance"] = max(result.offline_acceptance, result.on_policy_acceptance)
    return Trained(result.best_dir or offline.best_dir, offline, record)


def phase_figures(record: dict[str, Any]) -> dict[str, float | bool]:
    """What the on-policy phase was judged by, where there was one."""
    result = record.get("on_policy")
    if result is None:
        return {}
    return {
        "offline_acceptance": result["offline_acceptance"],
        "on_policy_acceptance": result["on_policy_acceptance"],
        "on_policy_kept": result["kept"],
    }


def _reference_losses(
    context: StageContext, draft: PreTrainedModel, rows: Dataset, live: PreTrainedModel | None, common: dict[str, Any]
) -> list[np.ndarray]:
    """Train a copy of the draft for the reference's budget; its losses on all rows."""
    train = context.config.train
    selection = train.token_selection
    short = replace(
        train, max_steps=selection.reference_steps, max_minutes=selection.reference_minutes,
        token_selection=TokenSelectionConfig(), on_policy=OnPolicyConfig(),
    )
    trained = train_draft(
        copy.deepcopy(draft), rows, train=short, output_dir=context.work_dir / REFERENCE, target=live, **common
    )
    reference = load_causal_lm(str(trained.best_dir), "float32", context.target.trust_remote_code, field="draft")
    return reference_losses(
        reference, rows, loss=common["loss"], train=train, target=live, vocab_ids=common["vocab_ids"]
    )
