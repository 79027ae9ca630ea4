"""Stage folders as finished trials leave them, written by the test itself instead of by the pipeline."""

import json
from pathlib import Path
from typing import Any

from pipeline.store import StageRecord, Store
from pipeline.trials import Trial


def write_trial(
    trial: Trial,
    *,
    sums: dict[tuple[float, str], list[float]],
    counts: list[int],
    acceptance: dict[str, Any] | None = None,
    num_steps: int = 100,
) -> None:
    """Finish corpus, distill and eval of the trial. `sums`: accepted mass per prompt by (temperature, sampler)."""
    by_prompt = [
        {
            "draft": draft,
            "temperature": temperature,
            "sampler": sampler,
            "prompt_ids": [f"prompt {i}" for i in range(len(counts))],
            "sums": [value * share for value in values],
            "counts": counts,
        }
        for draft, share in (("undistilled", 0.1), ("distilled", 1.0))
        for (temperature, sampler), values in sums.items()
    ]
    train = {"num_steps": num_steps, "tokens_per_second": 1000.0, "seconds": 60.0, "vocab_shortlist": None}
    finish_stage(trial, "corpus", {"corpus.json": {"num_response_tokens": 5000}})
    finish_stage(trial, "distill", {"train.json": train})
    finish_stage(trial, "eval", {"acceptance.json": {"by_prompt": by_prompt, **(acceptance or {})}})


def finish_stage(trial: Trial, stage: str, files: dict[str, Any]) -> None:
    store, fingerprint = Store(Path(trial.config.artifacts_dir)), trial.fingerprints[stage]
    if store.finished(stage, fingerprint) is not None:
        return
    work_dir = store.work_dir(stage, fingerprint)
    work_dir.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (work_dir / name).write_text(json.dumps(content))
    record = StageRecord(
        stage=stage, stage_version=1, fingerprint=fingerprint, config={}, inputs={}, figures={}, seconds=60.0,
        resumed=False, versions={}, git_commit=None,
    )  # fmt: skip
    store.finish(record)
