"""The draft before its training, as `draft.init` says."""

import json
import shutil
from dataclasses import replace
from typing import Any

from datasets import Dataset
from transformers import PreTrainedConfig, PreTrainedModel

from distill.config import DraftConfig, OnPolicyConfig, TokenSelectionConfig, TrainConfig
from distill.draft_init import (
    candidate_layers,
    check_narrower,
    choose_layers,
    draft_from_layers,
    narrow_draft,
    random_draft,
    select_layers,
    sized_config,
)
from distill.train import train_draft
from distill.training_run import AcceptanceOf
from pipeline.context import StageContext
from pipeline.models import load_causal_lm, obtain_model
from pipeline.schema import Config
from pipeline.store import write_json

#: Tokens of training rows from which `width` learns what to keep: its largest matrix has hidden size ** 2 entries.
NUM_STATISTICS_TOKENS = 16384
#: Folder of the short trainings of `chosen`, in the stage's folder while it works.
CANDIDATES = "candidates"


def obtain_initial_draft(
    context: StageContext,
    target: PreTrainedModel,
    rows: Dataset,
    *,
    vocab_ids: list[int] | None,
    acceptance_of: AcceptanceOf,
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """The draft with fp32 weights, and what was measured to choose it.

    It is written to `undistilled/` and `init.json`, and read from there, so that a killed stage goes on with the same one.
    """
    folder, record = context.work_dir / "undistilled", context.work_dir / "init.json"
    if not folder.exists():
        draft, figures = _initial_draft(context, target, rows, vocab_ids, acceptance_of)
        write_json(record, figures)
        unfinished = folder.with_name(folder.name + ".incomplete")
        shutil.rmtree(unfinished, ignore_errors=True)
        draft.float().save_pretrained(unfinished)
        unfinished.rename(folder)
        shutil.rmtree(context.work_dir / CANDIDATES, ignore_errors=True)
    draft = load_causal_lm(str(folder), "float32", context.config.target.trust_remote_code, field="draft")
    return draft, json.loads(record.read_text(encoding="utf-8"))


def candidate_draft(config: Config, target: PreTrainedModel) -> PreTrainedModel:
    """The draft as it will be before training, in the target's dtype and on its device."""
    if config.draft.path is not None:
        folder = obtain_model(config.draft.path, field="draft.path")
        return load_causal_lm(
            str(folder), config.target.dtype, config.target.trust_remote_code, field="draft.path"
        )
    return draft_of_shape(config.draft, target)


def draft_of_shape(settings: DraftConfig, target: PreTrainedModel) -> PreTrainedModel:
    """A draft of the size that `settings` ask for, for timing it before there is a corpus; `draft.path` is loaded elsewhere.

    A narrowed draft has random weights here, which cost what trained ones cost.
    """
    assert settings.path is None
    if settings.init in ("width", "random"):
        num_layers = len(_kept_layers(settings, target)) if settings.init == "width" else settings.num_layers
        return random_draft(target, num_layers=num_layers, **settings.sizes)
    return draft_from_layers(target, _kept_layers(settings, target))


def check_draft_settings(settings: DraftConfig, train: TrainConfig, target_config: PreTrainedConfig) -> None:
    """Raise ValueError for layers and sizes that this target cannot give; no weights are read."""
    if settings.init_is_medusa:
        return
    text = target_config.get_text_config()
    num_target_layers = int(text.num_hidden_layers)
    if settings.init == "chosen":
        candidate_layers(num_target_layers, settings.num_layers, settings.candidates)
    else:
        select_layers(num_target_layers, settings.num_layers, settings.keep_layers, pattern=settings.layer_pattern)
    if settings.init == "width":
        check_narrower(target_config, settings.sizes)
    sized_config(target_config, **settings.sizes)
    if settings.init == "random" and not train.train_embeddings:
        raise ValueError(
            "draft.init=random: its embeddings start as noise, and train.train_embeddings=false would keep them so; set "
            "train.train_embeddings=true"
        )


def _initial_draft(
    context: StageContext, target: PreTrainedModel, rows: Dataset, vocab_ids: list[int] | None, acceptance_of: AcceptanceOf
) -> tuple[PreTrainedModel, dict[str, Any]]:
    settings = context.config.draft
    if settings.path is not None:
        folder = obtain_model(settings.path, field="draft.path")
        trust = context.config.target.trust_remote_code
        return load_causal_lm(str(folder), "float32", trust, field="draft.path"), {"init": "pretrained"}
    if settings.init == "random":
        draft = random_draft(target, num_layers=settings.num_layers, **settings.sizes, seed=context.config.train.seed)
        return draft, {"init": "random"}
    if settings.init == "chosen":
        return _chosen(context, target, rows, vocab_ids, acceptance_of)
    kept = _kept_layers(settings, target)
    draft, figures = draft_from_layers(target, kept), {"init": settings.init, "keep_layers": kept}
    if settings.init == "width":
        draft = narrow_draft(draft, _statistics_rows(rows), **settings.sizes)
    return draft, figures


def _kept_layers(settings: DraftConfig, target: PreTrainedModel) -> list[int]:
    num_target_layers = int(target.config.get_text_config().num_hidden_layers)
    if settings.init == "chosen":
        return candidate_layers(num_target_layers, settings.num_layers, settings.candidates)[0]
    return select_layers(num_target_layers, settings.num_layers, settings.keep_layers, pattern=settings.layer_pattern)


def _chosen(
    context: StageContext, target: PreTrainedModel, rows: Dataset, vocab_ids: list[int] | None, acceptance_of: AcceptanceOf
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Train each candidate for `draft.candidate_steps`; a killed stage goes on with the candidate that it was at."""
    config, settings = context.config, context.config.draft
    short = replace(
        config.train, max_steps=settings.candidate_steps, max_minutes=None, eval_every_steps=settings.candidate_steps,
        token_selection=TokenSelectionConfig(), on_policy=OnPolicyConfig(),
    )
    seconds: dict[str, float] = {}

    def heal(draft: PreTrainedModel, name: str) -> float:
        result = train_draft(
            draft.float(), rows, loss=config.loss, train=short, output_dir=context.work_dir / CANDIDATES / name,
            acceptance_of=acceptance_of, target=target if config.loss.teacher == "online" else None, vocab_ids=vocab_ids,
            train_head=settings.has_own_head,
        )
        seconds[name] = result.seconds
        return result.best_acceptance

    num_target_layers = int(target.config.get_text_config().num_hidden_layers)
    chosen = choose_layers(target, candidate_layers(num_target_layers, settings.num_layers, settings.candidates), heal)
    figures = {
        "init": "chosen", "keep_layers": chosen.keep_layers, "candidate_acceptance": chosen.acceptance,
        "candidate_seconds": seconds,
    }
    return draft_from_layers(target, chosen.keep_layers), figures


def _statistics_rows(rows: Dataset) -> list[list[int]]:
    """The first rows, prompt and response, up to `NUM_STATISTICS_TOKENS`; at least one."""
    found: list[list[int]] = []
    num_tokens = 0
    for row in rows.select_columns(["prompt_token_ids", "response_token_ids"]):
        tokens = [*row["prompt_token_ids"], *row["response_token_ids"]]
        if found and num_tokens + len(tokens) > NUM_STATISTICS_TOKENS:
            break
        found.append(tokens)
        num_tokens += len(tokens)
    return found
