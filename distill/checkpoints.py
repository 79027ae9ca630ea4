"""What a training run leaves on disk, written so that a kill at any moment leaves something to resume from.

    <output_dir>/call.json                   what is being trained, to refuse another call's folder
    <output_dir>/checkpoints/checkpoint-N/   the trainer's state and progress.json; only the newest is kept
    <output_dir>/best-N/                     the best draft so far, a plain Hugging Face folder (safetensors)
    <output_dir>/result.json                 written last: the run is complete
"""

import copy
import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

#: In a checkpoint: how many bytes each of its files has, by which one that lost its end is known.
SIZES = "sizes.json"


@dataclass
class Progress:
    """How far a run is; saved with every checkpoint. `curve` holds (step, held-out acceptance rate).

    `num_processes` and `engine` are those that wrote it last.
    """

    step: int = 0
    seconds: float = 0.0
    num_supervised_tokens: int = 0
    num_processes: int = 1
    engine: str | None = None
    curve: list[tuple[int, float]] = field(default_factory=list)

    @property
    def best(self) -> tuple[int, float] | None:
        """(step, acceptance) of the best evaluation, the earliest of equals."""
        return max(self.curve, key=lambda point: point[1]) if self.curve else None


class CheckpointStore:
    """The folder of one training run. Everything appears by rename, whole."""

    def __init__(self, output_dir: Path, call: dict[str, Any] | None) -> None:
        """`call` is what is trained; None only reads."""
        self.output_dir = output_dir
        self.checkpoint_dir = output_dir / "checkpoints"
        self.incoming_dir = self.checkpoint_dir / "incoming"
        if call is None:
            return
        self.output_dir.mkdir(parents=True, exist_ok=True)
        self._claim(json.loads(json.dumps(call)))
        shutil.rmtree(self.incoming_dir, ignore_errors=True)

    def _claim(self, call: dict[str, Any]) -> None:
        path = self.output_dir / "call.json"
        if not path.exists():
            _write_json(path, call)
            return
        try:
            before = json.loads(path.read_text())
        except ValueError as error:
            raise ValueError(f"{path} is damaged: delete the folder {self.output_dir} to train anew") from error
        if before != call:
            changed = sorted(name for name in {**before, **call} if before.get(name) != call.get(name))
            raise ValueError(
                f"output_dir={self.output_dir} holds a training with other {', '.join(changed)}: delete the folder to train "
                "anew, or choose another"
            )

    def latest(self) -> tuple[Path, Progress] | None:
        """The newest whole checkpoint and its progress, or None."""
        for path in sorted(self.checkpoint_dir.glob("checkpoint-*"), key=_step_of, reverse=True):
            try:
                _require_whole(path)
                return path, _read_progress(path / "progress.json")
            except (OSError, ValueError) as error:
                logger.warning("%s is damaged, as after a power cut, and is not used: %s", path, error)
        return None

    def publish(self, progress: Progress) -> None:
        """Make the checkpoint that the trainer wrote to `incoming_dir` the current one and drop what it replaces."""
        name = f"checkpoint-{progress.step}"
        incoming = self.incoming_dir / name
        _write_json(incoming / "progress.json", asdict(progress))
        files = [path for path in incoming.rglob("*") if path.is_file()]
        _write_json(incoming / SIZES, {str(path.relative_to(incoming)): path.stat().st_size for path in files})
        shutil.rmtree(self.checkpoint_dir / name, ignore_errors=True)
        incoming.rename(self.checkpoint_dir / name)
        for old in self.checkpoint_dir.glob("checkpoint-*"):
            if old.name != name:
                shutil.rmtree(old)
        # A resumed run may go back to the last checkpoint's best, so older ones go only now.
        self._prune_best(progress)

    def best_dir(self, step: int) -> Path:
        """Folder of the draft as it was at `step`."""
        return self.output_dir / f"best-{step}"

    def save_best(self, model: PreTrainedModel, step: int, dtype: torch.dtype) -> None:
        """Save the model in `dtype` as the best so far."""
        self.put_best(step, _cast_copy(model, dtype).save_pretrained)

    def put_best(self, step: int, save: Callable[[Path], object]) -> None:
        """What `save` writes into a new folder is the best so far."""
        incoming = self.output_dir / "best.incoming"
        shutil.rmtree(incoming, ignore_errors=True)
        save(incoming)
        shutil.rmtree(self.best_dir(step), ignore_errors=True)
        incoming.rename(self.best_dir(step))

    def result(self) -> Progress | None:
        """What `finish` was given, or None while the run is not complete."""
        path = self.output_dir / "result.json"
        return _read_progress(path) if path.exists() else None

    def finish(self, progress: Progress) -> None:
        """Mark the run complete; only the best draft and the result stay."""
        _write_json(self.output_dir / "result.json", asdict(progress))
        self._prune_best(progress)
        shutil.rmtree(self.checkpoint_dir, ignore_errors=True)

    def _prune_best(self, progress: Progress) -> None:
        assert progress.best is not None
        for path in self.output_dir.glob("best-*"):
            if path != self.best_dir(progress.best[0]):
                shutil.rmtree(path)


def _step_of(path: Path) -> int:
    return int(path.name.rsplit("-", 1)[1])


def _read_progress(path: Path) -> Progress:
    values = json.loads(path.read_text())
    values["curve"] = [(step, acceptance) for step, acceptance in values["curve"]]  # JSON has lists only
    return Progress(**values)


def _require_whole(checkpoint: Path) -> None:
    """Raises ValueError for a file that is shorter than it was written, OSError for one that is gone."""
    sizes = checkpoint / SIZES
    for name, num_bytes in json.loads(sizes.read_text()).items() if sizes.is_file() else ():
        found = (checkpoint / name).stat().st_size
        if found != num_bytes:
            raise ValueError(f"{name} has {found} of {num_bytes} bytes")


def _write_json(path: Path, value: dict[str, Any]) -> None:
    incoming = path.with_suffix(".incoming")
    incoming.write_text(json.dumps(value, indent=2) + "\n")
    incoming.replace(path)


def _cast_copy(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """The model in another dtype, for saving: its config then states the dtype of the weights beside it."""
    state = {name: tensor.detach().to(dtype) for name, tensor in model.state_dict().items()}
    config = copy.deepcopy(model.config)
    for part in (config, config.get_text_config()):
        part.dtype = dtype
    with torch.device("meta"):
        # Not from_config, which under DeepSpeed would shard it, and wait for the other processes.
        shell: PreTrainedModel = type(model)(config)
    shell.load_state_dict(state, assign=True)
    shell.tie_weights()
    shell.generation_config = model.generation_config
    return shell
