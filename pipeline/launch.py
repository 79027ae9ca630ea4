"""The distill stage's training on several processes: started with `accelerate launch`, followed, and read back.

The pipeline stays one process. It prepares what the training needs (the initial draft, what the target says about the
held-out rows), writes it beside, frees its models, and waits; the processes are `pipeline/train_worker.py`. What they are
derived from lies in the stage's folder, so a killed run is resumed like any other, also on another number of processes.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from distill.config import LossConfig, TrainConfig
from distill.train import trained_result
from pipeline.config import conf_dir
from pipeline.context import StageContext
from pipeline.processes import is_alive, process_mark
from pipeline.report import read_result
from pipeline.schema import Config
from pipeline.store import write_json
from pipeline.training_phases import Trained

#: The folder of a launched training in the stage's folder, and what lies there.
LAUNCH, CALL, HELD_OUT, METRICS, LAUNCHER = "launch", "call.pt", "held_out.pt", "metrics.jsonl", "launcher"
#: How many bytes of METRICS are in MLflow.
LOGGED = "logged.json"
POLL_SECONDS = 0.5
#: Exceptions that a process reports by kind and message, and that are raised again here.
REPORTED = {"ValueError": ValueError, "FloatingPointError": FloatingPointError}


@dataclass(frozen=True)
class LaunchedCall:
    """What every process is told. `parent` is the mark of the process that waits for them."""

    engine: str
    loss: LossConfig
    train: TrainConfig
    vocab_ids: list[int] | None
    train_head: bool
    corpus: Path
    held_out_fraction: float
    target: str
    target_dtype: str
    trust_remote_code: bool
    parent: str


def check_launch(config: Config) -> None:
    """Raise ValueError for a launch that cannot work here, or whose result nobody has shown to be right."""
    engine, train = config.launch.engine, config.train
    if engine is None:
        return
    if engine == "deepspeed" and importlib.util.find_spec("deepspeed") is None:
        raise ValueError(
            "launch.engine=deepspeed: DeepSpeed is not installed; install the extra `deepspeed` (pip install -e '.[deepspeed]'), or "
            "use launch.engine=fsdp"
        )
    if not torch.cuda.is_available() and (engine == "deepspeed" or config.launch.num_processes is None):
        raise ValueError(
            f"launch.engine={engine}: there is no GPU here; to train on the CPU's processes, set launch.num_processes and "
            "launch.engine=ddp or fsdp"
        )
    if engine == "deepspeed" and config.loss.teacher == "online":
        raise ValueError(
            "loss.teacher=online with launch.engine=deepspeed: it would not shard the live target; train from the corpus's cached "
            "top-k (loss.teacher=cached), or use launch.engine=fsdp"
        )
    if engine != "deepspeed" and _num_processes(config) == 1:
        raise ValueError(
            f"launch.engine={engine} needs two processes or more (launch.num_processes; without it there is one for each of the "
            f"{torch.cuda.device_count()} GPUs); for one process, set launch.engine=null"
        )
    if engine != "ddp" and train.liger:
        raise ValueError(f"train.liger=true with launch.engine={engine}: set train.liger=false, or use launch.engine=ddp")
    if engine == "deepspeed" and (config.draft.has_own_head or train.train_embeddings):
        raise ValueError(
            "launch.engine=deepspeed trains layers only: set draft.train_head=false and train.train_embeddings=false, or use "
            "launch.engine=fsdp"
        )
    for name, enabled in (("token_selection", train.token_selection.enabled), ("on_policy", train.on_policy.enabled)):
        if enabled:
            raise ValueError(f"train.{name} works in one process only: leave it out, or set launch.engine=null")


def _num_processes(config: Config) -> int:
    return config.launch.num_processes or torch.cuda.device_count()


def take_over_launched(context: StageContext) -> None:
    """Wait for the processes of a killed pipeline, which notice within a second, and log what they reported after it died:
    the training goes on behind it."""
    folder = context.work_dir / LAUNCH
    path = folder / LAUNCHER
    mark = path.read_text() if path.is_file() else ""
    while is_alive(mark):
        time.sleep(POLL_SECONDS)
    _log_new(context, folder)


def prepare_launch(
    context: StageContext, *, vocab_ids: list[int] | None, acceptance_of: Callable[[PreTrainedModel], float]
) -> None:
    """Write what the processes need to the stage's folder; its models can be freed then."""
    config, folder = context.config, context.work_dir / LAUNCH
    assert config.launch.engine is not None
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    call = LaunchedCall(
        engine=config.launch.engine, loss=config.loss, train=config.train, vocab_ids=vocab_ids,
        train_head=config.draft.has_own_head, corpus=context.inputs["corpus"].absolute(),
        held_out_fraction=config.corpus.held_out_fraction, target=context.target.path, target_dtype=config.target.dtype,
        trust_remote_code=config.target.trust_remote_code, parent=process_mark(os.getpid()),
    )  # fmt: skip
    torch.save(call, folder / CALL)
    # Only what the target said about some rows, and its head: process 0 measures without the target.
    torch.save(acceptance_of, folder / HELD_OUT)


def train_launched(context: StageContext) -> Trained:
    """Start the processes, log what they report, and return the training's result.

    Raises:
        ValueError, FloatingPointError: what a process raised.
        RuntimeError: they ended otherwise.
    """
    launch, folder = context.config.launch, context.work_dir / LAUNCH
    num_processes = _num_processes(context.config)
    # In a session of its own, so that Ctrl-C reaches this process only, which then ends the others.
    process = subprocess.Popen(launch_command(str(launch.engine), num_processes, context.work_dir), start_new_session=True)
    try:
        (folder / LAUNCHER).write_text(process_mark(process.pid))
        while process.poll() is None:
            time.sleep(POLL_SECONDS)
            _log_new(context, folder)
    finally:
        process.terminate()
        process.wait()
    _log_new(context, folder)
    result = trained_result(context.work_dir)
    if process.returncode != 0 or result is None:
        _raise_reported(folder, process.returncode)
    assert result is not None
    shutil.rmtree(folder)
    record = {**asdict(result), "on_policy": None, "launch": {"engine": launch.engine, "num_processes": num_processes}}
    return Trained(result.best_dir, result, record)


def launch_command(engine: str, num_processes: int, work_dir: Path) -> list[str]:
    """The command line that starts the processes of one training."""
    return [
        sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(conf_dir() / "accelerate" / f"{engine}.yaml"),
        "--num_processes", str(num_processes), "--main_process_port", "0", "-m", "pipeline.train_worker", str(work_dir.absolute()),
    ]  # fmt: skip


def _log_new(context: StageContext, folder: Path) -> None:
    """Log the whole lines that are not in MLflow yet."""
    metrics, logged = folder / METRICS, folder / LOGGED
    if not metrics.exists():
        return
    num_bytes = read_result(folder, LOGGED)["num_bytes"] if logged.exists() else 0
    with metrics.open("rb") as stream:
        stream.seek(num_bytes)
        text = stream.read()
    whole = text[: text.rfind(b"\n") + 1]
    for line in whole.splitlines():
        entry = json.loads(line)
        context.tracker.log_metrics(entry["metrics"], entry["step"])
    if whole:
        write_json(logged, {"num_bytes": num_bytes + len(whole)})


def _raise_reported(folder: Path, code: int) -> None:
    for path in sorted(folder.glob("error-*.json")):
        error = json.loads(path.read_text())
        raise REPORTED[error["kind"]](error["message"])
    raise RuntimeError(
        f"the launched training ended with exit code {code}; its own messages are above. The same command goes on from its last "
        "checkpoint"
    )
