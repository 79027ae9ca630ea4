"""The distill stage: a draft with the target's tokenizer, trained on the target's text."""

import gc
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from distill.config import EVAL_SAMPLERS
from eval.held_out import HeldOutAcceptance
from pipeline.context import StageContext, load_target
from pipeline.corpus.policy import share_temperatures
from pipeline.held_out import CorpusParts, corpus_parts
from pipeline.initial_draft import CANDIDATES, obtain_initial_draft
from pipeline.launch import LAUNCH, prepare_launch, take_over_launched, train_launched
from pipeline.report import read_result
from pipeline.shortlist import shortlist, shortlist_figures, with_chosen_shortlist
from pipeline.stage_medusa import distill_heads
from pipeline.store import write_json
from pipeline.training_figures import log_training_curve
from pipeline.training_phases import (
    ON_POLICY,
    REFERENCE,
    Trained,
    phase_figures,
    train_in_phases,
)


def run_distill(context: StageContext) -> dict[str, object]:
    """Write `undistilled/` and `draft/` (Hugging Face folders) and `train.json` (what export and eval read).

    With draft.init=medusa, `draft/` holds heads (`specdec_runtime.load_medusa_heads`), and there is no `undistilled/`.
    """
    take_over_launched(context)
    finished = context.work_dir / "train.json"
    if finished.is_file():  # killed while it cleaned up
        return _figures_of(read_result(context.work_dir, finished.name))
    if context.config.draft.init_is_medusa:
        return _figures_of(distill_heads(context))
    parts = corpus_parts(context)
    start = _prepare(context, parts)
    _free_memory()
    trained = start.train()
    _replace_folder(trained.best_dir, context.work_dir / "draft")
    log_training_curve(context.tracker, trained.offline.curve)
    record = {
        **trained.record,
        "best_dir": "draft",
        "tokens_per_second": trained.offline.num_supervised_tokens / max(trained.offline.seconds, 1e-9),
        "num_train_rows": len(parts.train),
        "num_validation_rows": len(parts.validation),
        "vocab_shortlist": start.vocab_ids,
        "shortlist_choice": start.shortlist_choice,
        "has_own_head": start.context.config.draft.has_own_head,
        "initial_draft": start.init,
    }
    write_json(finished, record)
    for leftover in ("checkpoints", LAUNCH, CANDIDATES, REFERENCE, ON_POLICY, *(path.name for path in context.work_dir.glob("best-*"))):
        shutil.rmtree(context.work_dir / leftover, ignore_errors=True)
    return _figures_of(record)


@dataclass(frozen=True)
class _Start:
    """What training begins with. `context`: with the chosen size of the head. `train` has the models that training needs."""

    context: StageContext
    init: dict[str, Any]
    vocab_ids: list[int] | None
    shortlist_choice: dict[str, Any] | None
    train: Callable[[], Trained]


def _prepare(context: StageContext, parts: CorpusParts) -> _Start:
    """All that the target itself is needed for before training. It is not kept, but for its head, in `acceptance_of`."""
    target = load_target(context)
    context, choice = with_chosen_shortlist(context, target, parts)
    config, vocab_ids = context.config, shortlist(context, parts.train)
    acceptance_of = HeldOutAcceptance(
        target, parts.validation, temperatures=share_temperatures(config.corpus),
        sampler=config.train.eval_sampler or EVAL_SAMPLERS[0], vocab_ids=vocab_ids,
    )  # fmt: skip
    draft, init = obtain_initial_draft(context, target, parts.train, vocab_ids=vocab_ids, acceptance_of=acceptance_of)
    if config.launch.engine is not None:
        prepare_launch(context, vocab_ids=vocab_ids, acceptance_of=acceptance_of)
        return _Start(context, init, vocab_ids, choice, partial(train_launched, context))
    live_target = target if config.loss.teacher == "online" else None
    train = partial(
        train_in_phases, context, draft, parts.train, target=live_target, vocab_ids=vocab_ids, acceptance_of=acceptance_of
    )
    return _Start(context, init, vocab_ids, choice, train)


def _free_memory() -> None:
    """Models are in reference cycles, which wait for the collector; CUDA keeps freed memory until it is told not to."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _figures_of(record: dict[str, Any]) -> dict[str, object]:
    """The numbers of a training that are worth a line in every report."""
    names = ("num_steps", "num_supervised_tokens", "seconds", "tokens_per_second", "best_acceptance")
    init = record["initial_draft"]
    chosen = {name: init[name] for name in ("keep_layers", "candidate_acceptance") if "candidate_acceptance" in init}
    sizes = shortlist_figures(record.get("shortlist_choice"))
    return {name: record[name] for name in names} | phase_figures(record) | chosen | sizes


def _replace_folder(source: Path, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(source, folder)
