"""What will a run take? `python -m pipeline.plan target=llama-3.1-8b draft=draft-0.5b tokens=100M gpu=h100`.

Needs no weights, no network and no GPU. `json=FILE` writes the plan there too.
"""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from pipeline.commands import run_command
from pipeline.console import result_console
from pipeline.plan.gpus import gpu_of
from pipeline.plan.settings import PlanSettings, read_settings
from pipeline.plan.shapes import draft_shape, target_shape
from pipeline.plan.stages import Plan, make_plan
from pipeline.plan.table import show
from pipeline.store import write_json


def main(words: Sequence[str]) -> None:
    """Print the plan that the words ask for.

    Raises:
        ValueError: a setting that cannot be, an unknown model or GPU, or a model that does not fit.
    """
    settings = read_settings(words)
    plan = plan_of(settings)
    console = result_console()
    show(console, plan, settings)
    if settings.json is not None:
        path = Path(settings.json)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, {"settings": asdict(settings), **asdict(plan)})
        except OSError as error:
            raise ValueError(f"json={settings.json!r}: cannot be written: {error}") from error
        console.print(f"\nplan: {path}", soft_wrap=True)


def plan_of(settings: PlanSettings) -> Plan:
    """The plan. Raises ValueError as `main`."""
    gpu = gpu_of(
        settings.gpu, memory_gb=settings.memory_gb, bandwidth_gb_s=settings.bandwidth_gb_s,
        bf16_tflops=settings.bf16_tflops, link_gb_s=settings.link_gb_s,
    )  # fmt: skip
    target = target_shape(settings.target)
    return make_plan(target, draft_shape(settings.draft, target), gpu, settings)


if __name__ == "__main__":
    run_command(main)
