"""The drafts that comparisons hold side by side: those that the distill stage left, and Medusa heads for the benchmark."""

import json
from pathlib import Path
from typing import Optional

import torch

from eval.teacher_forcing import Draft
from pipeline.context import StageContext
from pipeline.models import load_causal_lm
from pipeline.report import read_result
from pipeline.stage_medusa import load_heads
from specdec_runtime.loading import PROVENANCE_FILE
from specdec_runtime.medusa_heads import load_medusa_heads

#: The draft of `bench.medusa_heads`.
MEDUSA = "medusa"


def load_drafts(context: StageContext, *, dtype: Optional[str] = None) -> dict[str, Draft]:
    """`undistilled` and `distilled` in `dtype` (default: the target's), with their heads' shortlist.

    Of Medusa heads there are `distilled` ones only, which bring their shortlist themselves.

    Raises:
        ValueError: what the distill stage left is damaged.
    """
    if context.config.draft.init_is_medusa:
        return {"distilled": Draft(load_heads(context, dtype=dtype))}
    config, folder = context.config, context.inputs["distill"]
    ids = read_result(folder, "train.json")["vocab_shortlist"]
    vocab_ids = None if ids is None else torch.tensor(ids, dtype=torch.long)
    folders = {"undistilled": folder / "undistilled", "distilled": folder / "draft"}
    dtype, trust = dtype or config.target.dtype, config.target.trust_remote_code
    try:
        return {
            name: Draft(load_causal_lm(str(path), dtype, trust, field=f"the {name} draft"), vocab_ids)
            for name, path in folders.items()
        }
    except ValueError as error:
        raise ValueError(f"{error}\nRun the stage distill again (remove the folder {folder})") from error


def load_bench_drafts(context: StageContext, *, dtype: str) -> dict[str, Draft]:
    """Those of `load_drafts`, and the heads of `bench.medusa_heads`.

    Raises:
        ValueError: that folder holds no heads.
    """
    drafts, folder = load_drafts(context, dtype=dtype), context.config.bench.medusa_heads
    return drafts if folder is None else {**drafts, MEDUSA: Draft(load_medusa_heads(folder, dtype))}


def training_minutes(context: StageContext) -> dict[str, float | None]:
    """Minutes that each trained draft of `load_bench_drafts` was trained for; None where its folder does not say."""
    train = read_result(context.inputs["distill"], "train.json")
    seconds = {"distilled": train.get("seconds")}
    if context.config.bench.medusa_heads is not None:
        path = Path(context.config.bench.medusa_heads) / PROVENANCE_FILE
        record = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        seconds[MEDUSA] = record.get("train", {}).get("seconds")
    return {name: None if value is None else round(value / 60, 2) for name, value in seconds.items()}
