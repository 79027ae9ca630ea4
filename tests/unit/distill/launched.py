"""Trainings on two processes: forks of the test's own, joined by gloo, so that nothing is imported anew."""

import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState, PartialState

from distill.processes import Processes


def run_processes(call: Callable[[Processes], Any], folder: Path, *, count: int = 2, engine: str = "ddp") -> list[int]:
    """Make `call` in `count` processes; their exit codes. Once one has failed, the others are killed, as a launcher does."""
    folder.mkdir(parents=True, exist_ok=True)
    meeting = folder / f"meeting-{time.monotonic_ns()}"
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_run, args=(call, meeting, rank, count, engine)) for rank in range(count)]
    for process in processes:
        process.start()
    deadline = time.monotonic() + 60
    while any(process.is_alive() for process in processes):
        if any(process.exitcode for process in processes) or time.monotonic() > deadline:
            for process in processes:
                process.kill()
        time.sleep(0.05)
    for process in processes:
        process.join()
    return [int(process.exitcode or 0) for process in processes]


def _run(call: Callable[[Processes], Any], meeting: Path, rank: int, count: int, engine: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(count), LOCAL_WORLD_SIZE=str(count))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=count)
    # Earlier tests of this process had trainers of one process.
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    PartialState(cpu=True)
    try:
        call(Processes.launched(engine))
    except BaseException:
        import traceback

        traceback.print_exc()
        os._exit(1)
    dist.barrier()
    os._exit(0)
