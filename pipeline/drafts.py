"""The two drafts that every comparison holds side by side, as the distill stage left them."""

import json
from typing import Optional

import torch

from eval.teacher_forcing import Draft
from pipeline.context import StageContext
from pipeline.models import load_causal_lm
from pipeline.stage_medusa import load_heads


def load_drafts(context: StageContext, *, dtype: Optional[str] = None) -> dict[str, Draft]:
    """`undistilled` and `distilled` in `dtype` (default: the target's), with their heads' shortlist.

    Of Medusa heads there are `distilled` ones only, which bring their shortlist themselves.
    """
    if context.config.draft.init_is_medusa:
        return {"distilled": Draft(load_heads(context, dtype=dtype))}
    config, folder = context.config, context.inputs["distill"]
    ids = json.loads((folder / "train.json").read_text(encoding="utf-8"))["vocab_shortlist"]
    vocab_ids = None if ids is None else torch.tensor(ids, dtype=torch.long)
    folders = {"undistilled": folder / "undistilled", "distilled": folder / "draft"}
    dtype = dtype or config.target.dtype
    return {
        name: Draft(load_causal_lm(str(path), dtype, config.target.trust_remote_code), vocab_ids)
        for name, path in folders.items()
    }
