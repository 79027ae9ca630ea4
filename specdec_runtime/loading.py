"""Loads a draft folder as Draftsmith exports it, or any other causal LM."""

import json
from pathlib import Path
from typing import Optional

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

PROVENANCE_FILE = "draftsmith.json"


def load_draft(
    folder: str | Path, dtype: torch.dtype | str = torch.bfloat16, *, trust_remote_code: bool = False
) -> tuple[PreTrainedModel, Optional[torch.Tensor]]:
    """A draft model and the sorted ids that its head may be trimmed to (None: the whole vocabulary).

    Args:
        folder: a local folder or a Hugging Face id. dtype: a torch dtype or its name, e.g. "bfloat16".

    Raises:
        ValueError: the dtype is unknown, or the folder's `draftsmith.json` has a `vocab_shortlist` that is not a list of ids.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype_of(dtype), trust_remote_code=trust_remote_code)
    return model, read_vocab_shortlist(folder)


def dtype_of(dtype: torch.dtype | str) -> torch.dtype:
    """A torch dtype by its name. Raises ValueError for a name that is none."""
    named = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(named, torch.dtype):
        raise ValueError(f"dtype={dtype!r}: not a torch dtype; choose bfloat16, float16 or float32")
    return named


def read_vocab_shortlist(folder: str | Path) -> Optional[torch.Tensor]:
    """The `vocab_shortlist` of a draft folder's `draftsmith.json` as a LongTensor, or None when there is none."""
    path = Path(folder) / PROVENANCE_FILE
    if not path.is_file():
        return None
    ids = json.loads(path.read_text()).get("vocab_shortlist")
    if ids is None:
        return None
    if not isinstance(ids, list) or not ids or not all(isinstance(i, int) and i >= 0 for i in ids):
        raise ValueError(f"{path}: vocab_shortlist must be a non-empty list of token ids, or null")
    return torch.tensor(sorted(set(ids)), dtype=torch.long)
