"""Several processes train the same draft as one: equal losses and weights, killed and resumed, on another number of them."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from distill.config import LossConfig, TrainConfig
from distill.dataset import plan_steps
from distill.draft_init import draft_from_layers
from distill.processes import Processes
from tests.unit.distill.conftest import make_llama, make_rows
from tests.unit.distill.launched import run_processes
from tests.unit.distill.training_call import train

IDS = sorted({2, *range(0, 61, 3)})
#: Some steps have fewer rows than there are processes.
SETTINGS = {"max_steps": 10, "num_epochs": 9, "tokens_per_step": 14, "eval_every_steps": 5, "checkpoint_every_steps": 3}
KINDS = {
    "frozen head": {}, "own head": {"vocab_ids": IDS, "train_head": True}, "embeddings": {"train_embeddings": True},
    "two parts": {"gradient_accumulation_steps": 2}, "live teacher": {"loss": LossConfig(teacher="online")},
}  # fmt: skip


@pytest.fixture(autouse=True)
def _every_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distill.trainer_settings.LOGGING_STEPS", 1)


def call(output_dir: Path, kind: str, *, kill_at: int | None = None) -> Callable[[Processes], None]:
    """A training whose measurements rise, so that the last weights are kept; each reported loss is appended to a file."""

    def run(processes: Processes) -> None:
        measured = output_dir.parent / f"{output_dir.name}.measured"

        def acceptance_of(model: torch.nn.Module) -> float:
            # Nothing may wait for the others in here, and the model is whole.
            assert not any(type(parameter).__name__ == "DTensor" for parameter in model.parameters())
            with measured.open("a") as stream:
                stream.write("once\n")
            return 0.1 * len(measured.read_text().splitlines())

        def on_metrics(metrics: dict[str, float], step: int) -> None:
            if "loss" in metrics:
                with (output_dir.parent / f"{output_dir.name}.losses").open("a") as stream:
                    stream.write(json.dumps([step, metrics["loss"], metrics["grad_norm"]]) + "\n")
            if step == kill_at:
                os._exit(9)

        target = make_llama()
        train(
            draft_from_layers(target, [0, 3]), make_rows(target), output_dir, acceptance_of=acceptance_of, on_metrics=on_metrics,
            target=target, processes=processes, **{**SETTINGS, **KINDS[kind]},
        )

    return run


def outcome(output_dir: Path) -> tuple[dict[int, list[float]], dict[str, torch.Tensor]]:
    lines = (output_dir.parent / f"{output_dir.name}.losses").read_text().splitlines()
    losses = {step: values for step, *values in map(json.loads, lines)}
    model = AutoModelForCausalLM.from_pretrained(output_dir / "best-10")
    return losses, model.state_dict()


def assert_equal(left: Path, right: Path) -> None:
    (losses, weights), (other_losses, other_weights) = outcome(left), outcome(right)
    assert losses.keys() == other_losses.keys() == set(range(1, 11))
    for step, values in losses.items():
        assert values == pytest.approx(other_losses[step], abs=1e-5), step
    assert weights.keys() == other_weights.keys()
    for name, value in weights.items():
        torch.testing.assert_close(value, other_weights[name], atol=1e-4, rtol=0, msg=name)


@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_train_what_one_does(tmp_path: Path, engine: str, kind: str) -> None:
    call(tmp_path / "one", kind)(Processes())
    assert run_processes(call(tmp_path / "two", kind), tmp_path, engine=engine) == [0, 0]
    assert_equal(tmp_path / "one", tmp_path / "two")
    assert sorted(path.name for path in (tmp_path / "two").iterdir()) == ["best-10", "call.json", "result.json"]


@pytest.mark.parametrize(
    ("kind", "first", "then"),
    [
        ("frozen head", "ddp", None), ("frozen head", "fsdp", "fsdp"), ("frozen head", "ddp", "fsdp"), ("own head", "fsdp", None),
        ("own head", "fsdp", "ddp"), ("own head", None, "fsdp"), ("embeddings", "fsdp", None), ("embeddings", None, "fsdp"),
    ],
)  # fmt: skip
def test_killed_and_resumed_on_other_processes(tmp_path: Path, kind: str, first: str | None, then: str | None) -> None:
    """Killed between two checkpoints, then gone on with by 2, 1 or differently held processes. None: one, not launched."""
    call(tmp_path / "whole", kind)(Processes())
    folder = tmp_path / "killed"
    killed = call(folder, kind, kill_at=8)
    if first is None:
        assert run_processes(lambda processes: killed(Processes()), tmp_path, count=1) == [9]
    else:
        assert 9 in run_processes(killed, tmp_path, engine=first)
    assert [path.name for path in (folder / "checkpoints").glob("checkpoint-*")] == ["checkpoint-6"]
    if then is None:
        call(folder, kind)(Processes())
    else:
        assert run_processes(call(folder, kind), tmp_path, engine=then) == [0, 0]
    assert_equal(tmp_path / "whole", folder)


def test_all_go_by_one_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With clocks that differ, and a budget in time, they would stop at different steps, and wait for each other for ever."""
    settings = {**SETTINGS, "max_minutes": 0.05, "max_steps": None, "num_epochs": 2000, "eval_every_steps": 10**6}

    def run(processes: Processes) -> None:
        if not processes.is_main:
            monkeypatch.setattr("distill.schedule.time.monotonic", iter(range(10**9)).__next__)
        result = train(draft_from_layers(make_llama(), [0]), make_rows(make_llama()), tmp_path / "out", processes=processes, **settings)
        assert result.num_steps > 1

    assert run_processes(run, tmp_path) == [0, 0]


def test_a_step_has_the_same_rows_for_any_number_of_processes() -> None:
    lengths = [3, 9, 1, 7, 12, 5, 2, 8]
    train_config = TrainConfig(tokens_per_step=10, num_epochs=2)

    def steps(count: int) -> list[list[int]]:
        plan = plan_steps(lengths, train_config, 1, count)
        assert len(plan.micro_batches) == plan.num_steps * count
        parts = plan.micro_batches
        return [[row for part in parts[start : start + count] for row in part] for start in range(0, len(parts), count)]

    assert steps(1) == steps(2) == steps(5)
