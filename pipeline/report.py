"""`report.json`: what one run measured, and the table that is printed from it.

The card, the gate and the comparison of runs read this file. Speedups are those of `walltime_speedup` in bench rows:
tokens per second over the strongest plain decoding of the same run.
"""

import json
import os
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NotRequired, TypedDict, cast

import torch
import transformers
from rich.table import Table

from eval.bench_conditions import tree_name
from eval.draft_verdict import shows_gain


class AcceptanceRow(TypedDict):
    """One `acceptance_rate` with its bootstrap interval over prompts."""

    draft: str
    temperature: float
    sampler: str
    value: float
    low: float
    high: float
    num_positions: NotRequired[int]
    num_prompts: NotRequired[int]


class BenchRow(TypedDict):
    """One measured way to decode; `draft` is none, undistilled or distilled, and `gamma` is 0 for plain decoding.

    With `gamma_policy` auto, `gamma` is the upper bound; with a `tree`, its depth. With `synthetic_acceptance` the output means nothing.
    """

    backend: str
    draft: str
    temperature: float
    gamma: int
    gamma_policy: NotRequired[str]
    tree: NotRequired[str | list[int] | None]
    batch: int
    tokens_per_second: float
    walltime_speedup: float
    low: float
    high: float
    predicted_speedup: float | None
    block_efficiency: float
    latency_ms_p50: float | None
    latency_ms_p99: float | None
    lossless: bool | None
    synthetic_acceptance: NotRequired[float]


class AcceptanceFile(TypedDict):
    """`acceptance.json` of the eval stage; further keys are allowed."""

    acceptance_rate: list[AcceptanceRow]


class BenchFile(TypedDict):
    """`bench.json` of the bench stage; further keys are allowed. `settings` says what was run, and on what."""

    bench: list[BenchRow]
    settings: NotRequired[dict[str, Any]]


class Report(TypedDict):
    """Design: target (name, path), draft (name, path, num_parameters, num_layers, hidden_size), machine, corpus, minutes."""

    target: dict[str, Any]
    draft: dict[str, Any]
    machine: dict[str, Any]
    corpus: dict[str, Any]
    minutes: dict[str, float]
    acceptance_rate: list[AcceptanceRow]
    bench: list[BenchRow]
    prediction: list[dict[str, Any]]


def read_result(folder: Path, name: str) -> dict[str, Any]:
    """A stage's JSON result. Raises ValueError when the stage left none, or it was damaged since."""
    path = folder / name
    way_out = f"run the stage {folder.parent.name} again (remove the folder {folder})"
    if not path.is_file():
        raise ValueError(f"{path} is missing: {way_out}")
    try:
        return cast(dict[str, Any], json.loads(path.read_text(encoding="utf-8")))
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {way_out}") from error


def read_acceptance(folder: Path) -> list[AcceptanceRow]:
    """The rows of the eval stage."""
    return cast(AcceptanceFile, read_result(folder, "acceptance.json"))["acceptance_rate"]


def read_bench(folder: Path) -> BenchFile:
    """The rows and settings of the bench stage."""
    return cast(BenchFile, read_result(folder, "bench.json"))


def stage_minutes(inputs: Mapping[str, Path]) -> dict[str, float]:
    """Minutes that each finished stage took, from its `stage.json`."""
    minutes = {}
    for name, folder in inputs.items():
        if (folder / "stage.json").is_file():
            minutes[name] = round(float(read_result(folder, "stage.json")["seconds"]) / 60, 3)
    return minutes


def describe_machine(dtype: str) -> dict[str, Any]:
    """Processor or GPU, threads, dtype and versions: what a figure is worth nothing without."""
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
    return {
        "processor": _processor_name(),
        "gpu": gpu,
        "num_cpus": os.cpu_count(),
        "num_threads": torch.get_num_threads(),
        "dtype": dtype,
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__},
    }


def _processor_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def distilled_speedups(report: Report, *, temperature: float | None = None, draft: str = "distilled") -> list[BenchRow]:
    """The distilled draft's rows (or another's) at one temperature (the lowest measured by default) and the smallest batch, best first.

    Rows of gamma=auto and of trees are left out: a server is told one gamma.
    """
    rows = [row for row in report["bench"] if row["draft"] == draft and not is_auto(row) and not row.get("tree")]
    if not rows:
        return []
    temperature = min(row["temperature"] for row in rows) if temperature is None else temperature
    rows = [row for row in rows if row["temperature"] == temperature]
    batch = min((row["batch"] for row in rows), default=0)
    return sorted((row for row in rows if row["batch"] == batch), key=lambda row: -row["walltime_speedup"])


def is_auto(row: BenchRow) -> bool:
    """Whether the engine chose gamma as it went."""
    return row.get("gamma_policy", "fixed") == "auto"


def gamma_word(row: BenchRow) -> str:
    """gamma, or the tree, as tables show it."""
    tree = row.get("tree")
    if tree is not None:
        return f"tree {tree_name(tree)}"
    return f"auto, <= {row['gamma']}" if is_auto(row) else str(row["gamma"] or "-")


def headline_speedup(report: Report) -> BenchRow | None:
    """The row that the run is summed up by: the best gamma at the lowest temperature and smallest batch."""
    rows = distilled_speedups(report)
    return rows[0] if rows else None


def headline_acceptance(report: Report) -> AcceptanceRow | None:
    """The distilled draft's acceptance at the lowest temperature (where all samplers are one)."""
    rows = [row for row in report["acceptance_rate"] if row["draft"] == "distilled"]
    return min(rows, key=lambda row: (row["temperature"], -row["value"])) if rows else None


def best_gamma(rows: Iterable[BenchRow], *, default: int) -> int:
    """gamma of the fastest distilled row at the lowest temperature, `default` where none was measured."""
    best = headline_speedup(cast(Report, {"bench": list(rows)}))
    return best["gamma"] if best is not None else default


def best_draft_sample_method(rows: Iterable[AcceptanceRow]) -> str:
    """How to sample the draft when serving, by measured acceptance at the highest temperature; 'greedy' wins a tie (less work)."""
    distilled = [row for row in rows if row["draft"] == "distilled" and row["temperature"] > 0]
    if not distilled:
        return "greedy"
    hottest = max(row["temperature"] for row in distilled)
    value = {row["sampler"]: row["value"] for row in distilled if row["temperature"] == hottest}
    return "probabilistic" if value.get("probabilistic", 0.0) > value.get("greedy", 0.0) else "greedy"


def acceptance_table(rows: Iterable[AcceptanceRow]) -> Table:
    """Acceptance of each draft, temperature and sampler with its interval."""
    table = Table(title="acceptance_rate on held-out responses (95% interval over prompts)")
    for heading in ("draft", "temperature", "sampler"):
        table.add_column(heading)
    table.add_column("acceptance_rate", justify="right")
    for row in sorted(rows, key=lambda row: (row["temperature"], row["sampler"], row["draft"] == "distilled")):
        table.add_row(
            row["draft"],
            f"{row['temperature']:g}",
            row["sampler"],
            f"{row['value']:.3f} [{row['low']:.3f}, {row['high']:.3f}]",
            style="bold" if row["draft"] == "distilled" else None,
        )
    return table


def bench_table(rows: Iterable[BenchRow]) -> Table:
    """Speed of every way to decode, over the strongest plain decoding."""
    table = Table(title="decoding (walltime_speedup over the strongest plain decoding)")
    for heading in ("backend", "draft", "temp", "gamma", "batch"):
        table.add_column(heading)
    for heading in ("tokens/s", "walltime_speedup", "predicted", "tau", "p50 ms", "p99 ms", "output"):
        table.add_column(heading, justify="right")
    for row in rows:
        predicted = row.get("predicted_speedup")
        table.add_row(
            row["backend"],
            row["draft"],
            f"{row['temperature']:g}",
            gamma_word(row),
            str(row["batch"]),
            f"{row['tokens_per_second']:.1f}",
            f"{row['walltime_speedup']:.2f} [{row['low']:.2f}, {row['high']:.2f}]",
            "-" if predicted is None else f"{predicted:.2f}",
            f"{row['block_efficiency']:.2f}",
            _milliseconds(row["latency_ms_p50"]),
            _milliseconds(row["latency_ms_p99"]),
            lossless_word(row),
            style="bold green" if shows_gain(row["low"], row["high"]) else None,
        )
    return table


def _milliseconds(latency_ms: float | None) -> str:
    """`-` where no answer had a second token."""
    return "-" if latency_ms is None else f"{latency_ms:.1f}"


def lossless_word(row: BenchRow) -> str:
    """What the output is against plain decoding's. Only at temperature 0 is it compared: two samples differ, and their rule is exact."""
    if "synthetic_acceptance" in row:
        return "synthetic"
    exact = "same" if row["temperature"] == 0 else "exact rule"
    return {True: exact, False: "DIFFERS", None: "-"}[row["lossless"]]
