"""What `launch` refuses, and how processes are started, followed and read back."""

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import yaml

from pipeline import launch
from pipeline.config import conf_dir
from pipeline.context import StageContext
from pipeline.launch import (
    LAUNCH,
    LAUNCHER,
    METRICS,
    check_launch,
    launch_command,
    take_over_launched,
    train_launched,
)
from pipeline.models import ModelRef
from pipeline.processes import process_mark
from pipeline.tracker import Tracker
from tests.conftest import Composer


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["launch.engine=ddp"], "set launch.num_processes"),
        (["launch.engine=ddp", "launch.num_processes=1"], "set launch.engine=null"),
        (["launch.engine=deepspeed", "launch.num_processes=2"], "install the extra `deepspeed`"),
        (["launch.engine=fsdp", "launch.num_processes=2", "train.liger=true"], "train.liger=false"),
        (["launch.engine=ddp", "launch.num_processes=2", "train.on_policy.max_steps=1"], "train.on_policy"),
    ],
)
def test_what_cannot_work_is_refused(
    make_config: Composer, monkeypatch: pytest.MonkeyPatch, overrides: list[str], message: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(launch.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=message):
        check_launch(make_config("+experiment=tiny", *overrides))


def test_deepspeed_shards_no_target_and_trains_no_head(make_config: Composer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(launch.importlib.util, "find_spec", lambda name: object())
    check_launch(make_config("+experiment=tiny", "launch.engine=deepspeed"))
    with pytest.raises(ValueError, match="loss.teacher=cached"):
        check_launch(make_config("+experiment=tiny", "launch.engine=deepspeed", "loss.teacher=online"))
    with pytest.raises(ValueError, match="train_head=false"):
        check_launch(make_config("+experiment=tiny", "launch.engine=deepspeed", "draft.vocab_shortlist=64"))


def test_settings_that_say_nothing_are_refused(make_config: Composer) -> None:
    with pytest.raises(Exception, match="choose from"):
        make_config("launch.engine=horovod")
    with pytest.raises(Exception, match="launch.engine=ddp for one"):
        make_config("launch.num_processes=2")


@pytest.mark.parametrize("engine", ["ddp", "fsdp", "deepspeed"])
def test_every_engine_has_a_file_that_accelerate_reads(engine: str) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    command = launch_command(engine, 2, Path("folder"))
    file = command[command.index("--config_file") + 1]
    assert Path(file) == conf_dir() / "accelerate" / f"{engine}.yaml"
    values = yaml.safe_load(Path(file).read_text())
    assert load_config_from_file(file).distributed_type == values["distributed_type"]


class Recorder(Tracker):
    def __init__(self) -> None:
        self.seen: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics: Mapping[str, float], step: int = 0) -> None:
        self.seen.append((step, dict(metrics)))


@pytest.fixture
def context(make_config: Composer, tmp_path: Path) -> StageContext:
    (tmp_path / LAUNCH).mkdir()
    config = make_config("+experiment=tiny", "launch.engine=ddp", "launch.num_processes=2")
    return StageContext(config, tmp_path, {}, Recorder(), ModelRef("target", "target", "0"))


def pretend(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    monkeypatch.setattr(launch, "launch_command", lambda *arguments: [sys.executable, "-c", script])
    monkeypatch.setattr(launch, "POLL_SECONDS", 0.01)


def test_what_processes_report_is_logged_once(context: StageContext, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [json.dumps({"step": step, "metrics": {"loss": 1.0 / step}}) for step in (1, 2, 3)]
    result = {"step": 3, "seconds": 1.0, "num_supervised_tokens": 9, "curve": [[0, 0.1], [3, 0.4]]}
    script = f"""
import pathlib, time
folder = pathlib.Path({str(context.work_dir)!r})
for line in {lines!r}:
    with (folder / {LAUNCH!r} / {METRICS!r}).open("a") as stream:
        stream.write(line[:5]); stream.flush(); time.sleep(0.05); stream.write(line[5:] + chr(10))
(folder / "result.json").write_text({json.dumps(result)!r})
"""
    pretend(monkeypatch, script)
    trained = train_launched(context)
    assert context.tracker.seen == [(1, {"loss": 1.0}), (2, {"loss": 0.5}), (3, {"loss": 1 / 3})]
    assert trained.best_dir == context.work_dir / "best-3"
    assert trained.record["launch"] == {"engine": "ddp", "num_processes": 2}
    assert not (context.work_dir / LAUNCH).exists()


@pytest.mark.parametrize("kind", [ValueError, FloatingPointError])
def test_a_mistake_of_the_users_is_raised_here(
    context: StageContext, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    error = {"kind": kind.__name__, "message": "lower it"}
    (context.work_dir / LAUNCH / "error-1.json").write_text(json.dumps(error))
    pretend(monkeypatch, "raise SystemExit(1)")
    with pytest.raises(kind, match="lower it"):
        train_launched(context)


def test_processes_that_die_say_how_to_go_on(context: StageContext, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "raise SystemExit(9)")
    with pytest.raises(RuntimeError, match="exit code 9.*goes on from its last"):
        train_launched(context)


def test_what_a_killed_pipeline_left_running_is_waited_for(context: StageContext) -> None:
    """Until the launcher is dead; nobody has asked for its exit code, so its entry in the table of processes stays."""
    take_over_launched(context)
    launcher = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1)"])
    (context.work_dir / LAUNCH / LAUNCHER).write_text(process_mark(launcher.pid))
    started = time.monotonic()
    take_over_launched(context)
    assert time.monotonic() - started > 0.5
    assert launcher.poll() == 0


def test_what_processes_reported_after_the_pipeline_was_killed_is_logged_by_the_next(
    context: StageContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [json.dumps({"step": step, "metrics": {"loss": 1.0}}) + "\n" for step in (1, 2, 3)]
    metrics = context.work_dir / LAUNCH / METRICS
    metrics.write_text(lines[0])
    pretend(monkeypatch, "raise SystemExit(9)")
    with pytest.raises(RuntimeError):
        train_launched(context)
    with metrics.open("a") as stream:
        stream.write(lines[1] + lines[2][:5])  # killed while it wrote
    take_over_launched(context)
    take_over_launched(context)
    assert [step for step, _ in context.tracker.seen] == [1, 2]
