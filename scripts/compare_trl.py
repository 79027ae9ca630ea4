"""Training tokens per second and peak memory: this project's offline trainer against trl.DistillationTrainer.

Both train the same draft (layers of the target) on the same rows, grouped into the same optimiser steps, over the whole
vocabulary, with forward KL, AdamW, bf16 autocast and fp32 master weights. trl 1.16 has no offline mode: its trainer always
writes the completions itself. So its generation is replaced by the corpus answers and nothing else of it is touched: its
padding, its live teacher, its chunked divergence. Its gradient checkpointing, on by default, is off, which is the faster.

Variants: `trl`; `cached` (this project's default: top-k from the corpus, no target in memory); `online` (this project with the
live target: the very same loss as trl's). `--embeddings trained` is trl's default and `frozen` this project's; within a pair
both sides train the same parameters. Each measurement is a process of its own; they take turns, so that a busy machine
hits all alike. Figures: medians over the repeats and bootstrap intervals of the paired ratios.

    make compare-trl                                      (needs a corpus: make distill, or stages=[corpus])
    python scripts/compare_trl.py --corpus artifacts/latest/corpus --repeats 5 --output compare_trl.json
"""

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from datasets import load_from_disk
from rich.console import Console
from rich.table import Table
from transformers import TrainerCallback

from distill.config import LossConfig, TrainConfig
from distill.dataset import PackedDataset, StepPlan
from distill.draft_init import draft_from_layers
from distill.mixed_text import MixedTextTrainer
from distill.schedule import BudgetClock
from distill.topk import remap_table
from distill.trainer import DistillTrainer
from eval.bootstrap import bootstrap_mean
from pipeline.corpus import read_corpus
from pipeline.models import load_causal_lm, load_tokenizer

VARIANTS = ("trl", "cached", "online")
#: Steps that are not timed: allocations, first-touch of the optimiser's state.
NUM_WARMUP_STEPS = 2
GOALS = {"tokens_per_second": 2.0, "peak_mib": 0.5}


class StepClock(TrainerCallback):
    """Seconds at which the warm-up and the last step ended."""

    def __init__(self) -> None:
        self.times_s: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.times_s.append(time.perf_counter())


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Train for the given steps in this process; peak memory is the process's high-water mark."""
    base_mib = peak_mib()
    rows = load_from_disk(str(arguments.rows))
    draft = load_causal_lm(str(arguments.draft), "float32")
    if arguments.embeddings == "frozen":
        draft.get_input_embeddings().weight.requires_grad_(False)
    clock = StepClock()
    train = TrainConfig(
        learning_rate=1e-4, train_embeddings=arguments.embeddings == "trained", head_chunk_tokens=arguments.head_chunk_tokens
    )
    run = run_trl if arguments.variant == "trl" else run_ours
    num_tokens, loss = run(arguments, draft, rows, train, clock)
    timed = num_tokens[NUM_WARMUP_STEPS:]
    seconds = clock.times_s[-1] - clock.times_s[NUM_WARMUP_STEPS - 1]
    return {
        "variant": arguments.variant,
        "embeddings": arguments.embeddings,
        "num_supervised_tokens": sum(num_tokens),
        "tokens_per_second": sum(timed) / seconds,
        "peak_mib": peak_mib(),
        "imports_mib": base_mib,
        "first_loss": loss,
    }


def run_trl(
    arguments: argparse.Namespace, draft: Any, rows: Any, train: TrainConfig, clock: StepClock
) -> tuple[list[int], float]:
    """trl's trainer with the corpus answers as completions; returns supervised tokens per step and the first loss."""
    from trl import DistillationConfig

    dtype = json.loads((arguments.target / "config.json").read_text())["dtype"]
    args = DistillationConfig(
        output_dir=arguments.scratch,
        per_device_train_batch_size=arguments.rows_per_step,
        max_steps=len(rows) // arguments.rows_per_step,
        learning_rate=train.learning_rate,
        adam_beta2=train.adam_beta2,
        optim="adamw_torch_fused",
        beta=0.0,  # forward KL
        shuffle_dataset=False,
        gradient_checkpointing=arguments.checkpointing,
        use_cpu=not torch.cuda.is_available(),
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=train.seed,
    )
    trainer = MixedTextTrainer(
        draft, rows, args=args, tokenizer=load_tokenizer(str(arguments.target)), lmbda=lambda: 0.0,
        max_sequence_tokens=train.max_sequence_tokens, target=load_causal_lm(str(arguments.target), dtype), callbacks=[clock],
    )  # fmt: skip
    trainer.train()
    lengths = [min(len(r["response_token_ids"]), train.max_sequence_tokens - len(r["prompt_token_ids"]) + 1) for r in rows]
    size = arguments.rows_per_step
    steps = [sum(lengths[start : start + size]) for start in range(0, len(rows) // size * size, size)]
    return steps, first_loss(trainer)


def run_ours(
    arguments: argparse.Namespace, draft: Any, rows: Any, train: TrainConfig, clock: StepClock
) -> tuple[list[int], float]:
    """This project's trainer on the same rows in the same steps."""
    num_ids = draft.get_output_embeddings().weight.shape[0]
    dataset = PackedDataset(rows, train, remap_table(None, num_ids), with_topk=arguments.variant == "cached")
    size = arguments.rows_per_step
    groups = [list(range(start, start + size)) for start in range(0, len(rows) // size * size, size)]
    dataset.plan = StepPlan(groups, 1)
    target = None
    if arguments.variant == "online":
        target = load_causal_lm(
            str(arguments.target), json.loads((arguments.target / "config.json").read_text())["dtype"]
        )
    trainer = DistillTrainer(
        draft, dataset, loss=LossConfig(teacher=arguments.variant), train=train, checkpoint_dir=Path(arguments.scratch),
        clock=BudgetClock(None), target=target, callbacks=[clock],
    )  # fmt: skip
    trainer.args.logging_steps = 1
    trainer.train()
    return [dataset.num_tokens_of_step(step) for step in range(len(groups))], first_loss(trainer)


def first_loss(trainer: Any) -> float:
    """The first loss that the trainer logged, in nats per token."""
    return float(next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry))


def peak_mib() -> float:
    """High-water mark of resident memory in MiB; on CUDA, of allocated device memory once there is any."""
    if torch.cuda.is_available() and torch.cuda.max_memory_allocated():
        return torch.cuda.max_memory_allocated() / 2**20
    status = Path("/proc/self/status")
    if status.exists():  # ru_maxrss would start from the parent's
        (line,) = (line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return float(line.split()[1]) / 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def save_rows(arguments: argparse.Namespace) -> None:
    """The rows that are trained on, by themselves: the whole corpus in memory would be a common part of both peaks."""
    rows = read_corpus(arguments.corpus)
    num_rows = min(len(rows), arguments.rows_per_step * (arguments.steps + NUM_WARMUP_STEPS))
    rows.select(range(num_rows)).save_to_disk(str(arguments.rows))


def child(arguments: argparse.Namespace, variant: str, embeddings: str, draft: Path, scratch: Path) -> dict[str, Any]:
    """One measurement in a process of its own."""
    options = {"variant": variant, "embeddings": embeddings, "draft": draft, "scratch": scratch, "rows": arguments.rows,
               "target": arguments.target, "steps": arguments.steps, "rows-per-step": arguments.rows_per_step,
               "head-chunk-tokens": arguments.head_chunk_tokens}  # fmt: skip
    command = [sys.executable, __file__, *(word for name, value in options.items() for word in (f"--{name}", str(value)))]
    command += ["--checkpointing"] if arguments.checkpointing else []
    root = str(Path(__file__).resolve().parent.parent)
    environment = {**os.environ, "PYTHONPATH": root, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{variant} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def summarise(runs: list[dict[str, Any]], embeddings: str) -> list[dict[str, Any]]:
    """One row per variant: medians, and the mean paired ratio to trl with its interval."""
    of = {name: [run for run in runs if run["variant"] == name and run["embeddings"] == embeddings] for name in VARIANTS}
    table = []
    for name, own in of.items():
        if not own:
            continue
        row: dict[str, Any] = {"variant": name, "embeddings": embeddings}
        # What the training itself takes, beyond the interpreter and its libraries.
        columns = {
            "tokens_per_second": lambda run: run["tokens_per_second"],
            "peak_mib": lambda run: run["peak_mib"],
            "training_mib": lambda run: run["peak_mib"] - run["imports_mib"],
        }
        for column, value in columns.items():
            row[column] = statistics.median(map(value, own))
            ratios = [value(a) / value(b) for a, b in zip(own, of["trl"], strict=False)]
            row[f"{column}_ratio"] = bootstrap_mean(ratios).as_dict() if ratios else None
        row["first_loss"] = own[0]["first_loss"]
        table.append(row)
    return table


def show(table: list[dict[str, Any]]) -> None:
    """Print the summary."""
    view = Table(title="training: trl.DistillationTrainer and this project")
    for column in ("variant", "embeddings", "tokens/s", "ratio", "peak MiB", "ratio", "training MiB", "ratio", "first loss"):
        view.add_column(column)
    for row in table:
        cells = [row["variant"], row["embeddings"]]
        for column, digits in (("tokens_per_second", 0), ("peak_mib", 0), ("training_mib", 0)):
            ratio = row[f"{column}_ratio"]
            text = "" if ratio is None else f"{ratio['value']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})"
            cells += [f"{row[column]:.{digits}f}", text]
        view.add_row(*cells, f"{row['first_loss']:.3f}")
    Console(width=150).print(view)


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line; `--variant` marks a child process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, default=Path("artifacts/latest/corpus"), help="folder of a corpus stage")
    parser.add_argument("--target", type=Path, default=Path("artifacts/models/smollm2-135m-instruct"), help="Hugging Face folder")
    parser.add_argument("--keep-layers", type=int, nargs="+", default=[0, 1], help="the target's layers that make the draft")
    parser.add_argument("--rows-per-step", type=int, default=8)
    parser.add_argument("--steps", type=int, default=8, help="timed optimiser steps")
    parser.add_argument("--head-chunk-tokens", type=int, default=TrainConfig().head_chunk_tokens, help="train.head_chunk_tokens")
    parser.add_argument("--repeats", type=int, default=5, help="measurements of every variant")
    parser.add_argument("--embeddings", choices=("trained", "frozen", "both"), default="both")
    parser.add_argument("--checkpointing", action="store_true", help="trl with its default gradient checkpointing: slower, smaller")
    parser.add_argument("--output", type=Path, default=Path("compare_trl.json"))
    parser.add_argument("--variant", choices=VARIANTS, help=argparse.SUPPRESS)
    parser.add_argument("--draft", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--scratch", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    """Measure all variants in turns, print the table and write the JSON."""
    arguments = parse(argv)
    if arguments.variant is not None:
        print(json.dumps(measure(arguments)))
        return 0
    for name, folder in (("corpus", arguments.corpus), ("target", arguments.target)):
        if not folder.is_dir():
            print(f"--{name}={folder}: no such folder; `make distill` makes one, or name another", file=sys.stderr)
            return 2
    runs: list[dict[str, Any]] = []
    kinds = ("trained", "frozen") if arguments.embeddings == "both" else (arguments.embeddings,)
    with tempfile.TemporaryDirectory() as scratch:
        draft = Path(scratch) / "draft"
        draft_from_layers(load_causal_lm(str(arguments.target), "float32"), arguments.keep_layers).save_pretrained(draft)
        arguments.rows = Path(scratch) / "rows"
        save_rows(arguments)
        for repeat in range(arguments.repeats):
            for embeddings in kinds:
                # Every other round goes the other way, so that no variant always follows the same one.
                for variant in VARIANTS[:: 1 if repeat % 2 == 0 else -1]:
                    runs.append(child(arguments, variant, embeddings, draft, Path(scratch) / "run"))
                    print(json.dumps(runs[-1]), file=sys.stderr, flush=True)
    table = [row for kind in kinds for row in summarise(runs, kind)]
    machine = {"processor": platform.processor() or platform.machine(), "threads": torch.get_num_threads(),
               "versions": {name: version(name) for name in ("torch", "transformers", "trl")}}  # fmt: skip
    settings = {name: str(value) for name, value in vars(arguments).items() if name not in ("variant", "draft", "scratch", "rows")}
    report = {"settings": settings, "machine": machine, "goals": GOALS, "summary": table, "runs": runs}
    arguments.output.write_text(json.dumps(report, indent=2) + "\n")
    show(table)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
