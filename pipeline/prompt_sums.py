"""Acceptance prompt by prompt, as the eval stage keeps it: what runs on the same prompts are compared with.

Shapes: P prompts.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eval.acceptance_table import AcceptanceTable
from pipeline.report import read_result

Key = tuple[str, float, str]
"""draft, temperature, sampler"""


@dataclass(frozen=True)
class PromptSums:
    """Accepted mass and measured positions of each prompt, both [P], in the order of `prompt_ids`."""

    prompt_ids: tuple[str, ...]
    sums: NDArray[np.float64]
    counts: NDArray[np.float64]


def prompt_sums(table: AcceptanceTable) -> dict[str, Any]:
    """One entry of `by_prompt` in `acceptance.json`; several answers to a prompt are added up."""
    sums, counts = dict.fromkeys(table.prompt_ids, 0.0), dict.fromkeys(table.prompt_ids, 0)
    for name, values_N in zip(table.prompt_ids, table.values, strict=True):
        sums[name] += float(values_N.sum(dtype=np.float64))
        counts[name] += len(values_N)
    return {
        "draft": table.draft,
        "temperature": table.temperature,
        "sampler": table.sampler,
        "prompt_ids": list(sums),
        "sums": list(sums.values()),
        "counts": list(counts.values()),
    }


def read_prompt_sums(eval_folder: Path) -> dict[Key, PromptSums]:
    """`by_prompt` of a finished eval stage, by (draft, temperature, sampler).

    Raises:
        ValueError: the folder has none.
    """
    entries = read_result(eval_folder, "acceptance.json").get("by_prompt")
    if not entries:
        raise ValueError(f"{eval_folder}/acceptance.json has no by_prompt: remove the folder and run the stage eval again")
    return {
        (entry["draft"], float(entry["temperature"]), entry["sampler"]): PromptSums(
            tuple(entry["prompt_ids"]), np.array(entry["sums"], dtype=float), np.array(entry["counts"], dtype=float)
        )
        for entry in entries
    }
