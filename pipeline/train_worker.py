"""One process of a launched training: `accelerate launch -m pipeline.train_worker STAGE_FOLDER` (see `pipeline/launch.py`)."""

import json
import os
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from transformers.utils import logging as transformers_logging

from distill.processes import Processes
from distill.train import train_draft
from pipeline.corpus import read_corpus, split_corpus
from pipeline.launch import CALL, HELD_OUT, LAUNCH, METRICS, REPORTED, LaunchedCall
from pipeline.models import default_device, load_causal_lm
from pipeline.processes import is_alive
from pipeline.store import write_json

#: Processes wait for each other while one measures, or reads a large target.
TIMEOUT = timedelta(hours=1)


def main() -> None:
    """Train; a mistake of the user's is left as `error-RANK.json` for the waiting process to raise."""
    work_dir = Path(sys.argv[1])
    call: LaunchedCall = torch.load(work_dir / LAUNCH / CALL, weights_only=False)
    threading.Thread(target=_end_with, args=(call.parent,), daemon=True).start()
    transformers_logging.disable_progress_bar()
    # Joins the process group and chooses this process's GPU.
    PartialState(cpu=not torch.cuda.is_available(), timeout=TIMEOUT)
    processes = Processes.launched(call.engine)
    try:
        _train(work_dir, call, processes)
    except tuple(REPORTED.values()) as error:
        kind = next(name for name, known in REPORTED.items() if isinstance(error, known))
        write_json(work_dir / LAUNCH / f"error-{processes.rank}.json", {"kind": kind, "message": str(error)})
        raise
    # All is on the disk. PyTorch's threads may abort a process that takes itself down in order ("terminate called without an active
    # exception"), which would look like a failed training.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _train(work_dir: Path, call: LaunchedCall, processes: Processes) -> None:
    train_rows, _ = split_corpus(read_corpus(call.corpus), call.held_out_fraction)
    trust = call.trust_remote_code
    draft = load_causal_lm(str(work_dir / "undistilled"), "float32", trust, field="draft")
    target = None
    if call.loss.teacher == "online":
        # A GPU may not hold the whole one; sharding moves each process's part there.
        device = "cpu" if processes.shards else None
        target = load_causal_lm(call.target, call.target_dtype, trust, device=device)
    held_out = torch.load(work_dir / LAUNCH / HELD_OUT, weights_only=False, map_location=default_device()) if processes.is_main else None

    def report(metrics: dict[str, float], step: int) -> None:
        with (work_dir / LAUNCH / METRICS).open("a") as stream:
            stream.write(json.dumps({"step": step, "metrics": metrics}) + "\n")

    def acceptance_of(model: Any) -> float:
        assert held_out is not None
        return float(held_out(model))

    train_draft(
        draft, train_rows, loss=call.loss, train=call.train, output_dir=work_dir, acceptance_of=acceptance_of, on_metrics=report,
        target=target, vocab_ids=call.vocab_ids, train_head=call.train_head, processes=processes,
    )


def _end_with(parent: str) -> None:
    """A killed pipeline must not leave processes that go on writing into its folder."""
    while is_alive(parent):
        time.sleep(1.0)
    os._exit(1)


if __name__ == "__main__":
    main()
