"""The distill stage: a draft with the target's tokenizer, trained on the target's text."""

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from distill.draft_init import draft_from_layers, frequent_token_ids, select_layers
from distill.train import train_draft
from eval.held_out import HeldOutAcceptance
from pipeline.context import StageContext
from pipeline.held_out import CorpusParts, corpus_parts
from pipeline.models import load_causal_lm, load_tokenizer, obtain_model
from pipeline.store import write_json
from pipeline.training_figures import log_training_curve


def run_distill(context: StageContext) -> dict[str, object]:
    """Write `undistilled/` and `draft/` (Hugging Face folders) and `train.json` (what export and eval read)."""
    finished = context.work_dir / "train.json"
    if finished.is_file():  # killed while it cleaned up
        return _figures_of(json.loads(finished.read_text(encoding="utf-8")))
    config, parts = context.config, corpus_parts(context)
    target = load_causal_lm(context.target.path, dtype=config.target.dtype, trust_remote_code=config.target.trust_remote_code)
    vocab_ids = shortlist(context, parts)
    draft = initial_draft(context, target)
    _save_once(draft, context.work_dir / "undistilled")
    acceptance_of = HeldOutAcceptance(target, parts.validation, temperatures=config.corpus.temperatures, vocab_ids=vocab_ids)
    result = train_draft(
        draft, parts.train, loss=config.loss, train=config.train, output_dir=context.work_dir, vocab_ids=vocab_ids,
        target=target if config.loss.teacher == "online" else None,
        acceptance_of=acceptance_of, on_metrics=context.tracker.log_metrics)
    _replace_folder(result.best_dir, context.work_dir / "draft")
    log_training_curve(context.tracker, result.curve)
    record = {
        **asdict(result),
        "best_dir": "draft",
        "tokens_per_second": result.num_supervised_tokens / max(result.seconds, 1e-9),
        "num_train_rows": len(parts.train),
        "num_validation_rows": len(parts.validation),
        "vocab_shortlist": vocab_ids,
    }
    write_json(finished, record)
    for leftover in (context.work_dir / "checkpoints", *context.work_dir.glob("best-*")):
        shutil.rmtree(leftover, ignore_errors=True)
    return _figures_of(record)


def _figures_of(record: dict[str, Any]) -> dict[str, object]:
    """The numbers of a training that are worth a line in every report."""
    return {name: record[name] for name in ("num_steps", "num_supervised_tokens", "seconds", "tokens_per_second", "best_acceptance")}


def initial_draft(context: StageContext, target: PreTrainedModel) -> PreTrainedModel:
    """`draft.path` as it is, or a copy of some of the target's layers; fp32 master weights."""
    settings = context.config.draft
    if settings.path is not None:
        folder = obtain_model(settings.path, field="draft.path")
        return load_causal_lm(str(folder), "float32", context.config.target.trust_remote_code, field="draft.path")
    num_target_layers = target.config.get_text_config().num_hidden_layers
    return draft_from_layers(target, select_layers(num_target_layers, settings.num_layers, settings.keep_layers)).to(torch.float32)


def shortlist(context: StageContext, parts: CorpusParts) -> list[int] | None:
    """The ids that the draft's head is trimmed to, ascending: the most frequent ones of the training rows."""
    num_ids = context.config.draft.vocab_shortlist
    if num_ids is None:
        return None
    tokenizer = load_tokenizer(context.target.path)
    return frequent_token_ids(parts.train, num_ids, tokenizer.all_special_ids)


def _save_once(model: PreTrainedModel, folder: Path) -> None:
    if not folder.exists():
        unfinished = folder.with_name(folder.name + ".incomplete")
        model.save_pretrained(unfinished)
        unfinished.rename(folder)


def _replace_folder(source: Path, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(source, folder)
