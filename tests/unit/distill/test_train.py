"""The training run as a whole: budgets, checkpoints, resume, the choice of the best draft."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from distill.config import LossConfig
from distill.draft_init import draft_from_layers
from distill.sharding import save_state
from tests.unit.distill.training_call import Killed, MakeModel, MakeRows, assert_same, train, weights


def test_resumed_run_equals_uninterrupted(llama: MakeModel, rows: MakeRows, tmp_path: Path) -> None:
    """speculators 900: killed twice, at other places, the run ends with the same weights, rate and curve."""
    corpus, settings = rows(llama()), {"max_steps": 11, "num_epochs": 9, "gradient_accumulation_steps": 2}
    curve = [0.1, 0.2, 0.5, 0.3]
    rates: dict[str, dict[int, float]] = {"whole": {}, "killed": {}}

    def note(run: str, kill_at: int | None = None) -> Callable[[dict[str, float], int], None]:
        def on_metrics(metrics: dict[str, float], step: int) -> None:
            if "learning_rate" in metrics:
                rates[run][step] = metrics["learning_rate"]
            if step == kill_at:
                raise Killed

        return on_metrics

    whole = draft_from_layers(llama(), [0, 3])
    expected = train(whole, corpus, tmp_path / "whole", curve=curve, on_metrics=note("whole"), **settings)
    for kill_at, values in ((4, curve[:2]), (8, curve[1:3])):
        with pytest.raises(Killed):
            train(
                draft_from_layers(llama(), [0, 3]), corpus, tmp_path / "killed", curve=values,
                on_metrics=note("killed", kill_at), **settings,
            )
    resumed = draft_from_layers(llama(), [0, 3])
    result = train(resumed, corpus, tmp_path / "killed", curve=curve[2:], on_metrics=note("killed"), **settings)
    assert_same(weights(resumed), weights(whole))
    assert rates["killed"] == rates["whole"]
    assert result.curve == expected.curve == [(0, 0.1), (4, 0.2), (8, 0.5), (11, 0.3)]
    assert (result.num_steps, result.num_supervised_tokens) == (11, expected.num_supervised_tokens)
    for name in ("killed", "whole"):
        assert sorted(path.name for path in (tmp_path / name).iterdir()) == ["best-8", "call.json", "result.json"]
    best = [AutoModelForCausalLM.from_pretrained(tmp_path / name / "best-8") for name in ("killed", "whole")]
    assert_same(weights(best[0]), weights(best[1]))


def test_kill_while_a_checkpoint_is_written(
    llama: MakeModel, rows: MakeRows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A half-written checkpoint lies in `incoming` and is never resumed from."""
    corpus, settings = rows(llama()), {"max_steps": 8, "num_epochs": 9}
    whole = draft_from_layers(llama(), [0, 3])
    train(whole, corpus, tmp_path / "whole", **settings)
    real_save, written = torch.save, []

    def save(value: object, path: object, **kwargs: object) -> None:
        written.append(Path(path).name if isinstance(path, Path) else "")
        if written.count("scheduler.pt") == 2:
            raise Killed
        real_save(value, path, **kwargs)

    monkeypatch.setattr(torch, "save", save)
    with pytest.raises(Killed):
        train(draft_from_layers(llama(), [0, 3]), corpus, tmp_path / "killed", **settings)
    monkeypatch.undo()
    checkpoints = tmp_path / "killed" / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["checkpoint-3", "incoming"]
    resumed = draft_from_layers(llama(), [0, 3])
    train(resumed, corpus, tmp_path / "killed", **settings)
    assert_same(weights(resumed), weights(whole))


@pytest.mark.parametrize("name", ["state/__0_0.distcp", "state/.metadata", "scheduler.pt", "progress.json"])
def test_a_checkpoint_that_lost_its_end_is_not_gone_on_from(
    llama: MakeModel, rows: MakeRows, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """speculators 739: a truncated checkpoint was resumed from, and nothing but its removal by hand helped."""
    corpus, settings = rows(llama()), {"max_steps": 5, "num_epochs": 9}
    whole = draft_from_layers(llama(), [0, 3])
    expected = train(whole, corpus, tmp_path / "whole", **settings)

    def kill(metrics: dict[str, float], step: int) -> None:
        if step == 4:
            raise Killed

    with pytest.raises(Killed):
        train(draft_from_layers(llama(), [0, 3]), corpus, tmp_path / "cut", on_metrics=kill, **settings)
    file = tmp_path / "cut" / "checkpoints" / "checkpoint-3" / name
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    resumed = draft_from_layers(llama(), [0, 3])
    result = train(resumed, corpus, tmp_path / "cut", **settings)
    assert "checkpoint-3 is damaged" in caplog.text
    assert_same(weights(resumed), weights(whole))
    assert result.num_supervised_tokens == expected.num_supervised_tokens


def test_a_checkpoint_that_cannot_be_written_is_an_ordinary_error(llama: MakeModel, tmp_path: Path) -> None:
    """speculators 743: PyTorch wraps it in a BaseException, past everything that names a full disk."""
    (tmp_path / "file").write_text("")
    draft = llama()
    with pytest.raises(OSError, match="file"):
        save_state(tmp_path / "file" / "state", draft, torch.optim.AdamW(draft.parameters()))


def test_best_is_chosen_by_held_out_acceptance(llama: MakeModel, rows: MakeRows, tmp_path: Path) -> None:
    """DeepSpec 84: the loss still falls while acceptance falls; the earlier draft is the one that is kept."""
    seen: dict[int, float] = {}
    result = train(
        draft_from_layers(llama(), [0, 3]).bfloat16(), rows(llama()), tmp_path, curve=[0.1, 0.6, 0.2, 0.2], max_steps=12,
        num_epochs=9, on_metrics=lambda metrics, step: seen.update({step: metrics.get("acceptance_rate", 0.0)}),
    )
    assert (result.best_acceptance, result.best_dir.name) == (0.6, "best-4")
    assert seen[4] == 0.6
    names = {path.name for path in result.best_dir.iterdir()}
    assert names == {"config.json", "generation_config.json", "model.safetensors"}
    # The draft came in bf16 and is saved so, though it was trained in fp32.
    assert json.loads((result.best_dir / "config.json").read_text())["dtype"] == "bfloat16"
    assert AutoModelForCausalLM.from_pretrained(result.best_dir).dtype == torch.bfloat16


def test_untrained_draft_is_kept_when_training_hurts(llama: MakeModel, rows: MakeRows, tmp_path: Path) -> None:
    draft = draft_from_layers(llama(), [0, 3])
    before = weights(draft)
    result = train(draft, rows(llama()), tmp_path, curve=[0.5, 0.1], max_steps=5, num_epochs=9)
    assert result.best_dir.name == "best-0"
    assert_same(weights(AutoModelForCausalLM.from_pretrained(result.best_dir)), before)


def test_complete_run_is_returned_without_training(llama: MakeModel, rows: MakeRows, tmp_path: Path) -> None:
    first = train(draft_from_layers(llama(), [0, 3]), rows(llama()), tmp_path, curve=[0.1, 0.3], max_steps=4)
    draft = draft_from_layers(llama(), [0, 3])
    before = weights(draft)
    assert train(draft, rows(llama()), tmp_path, curve=[0.9], max_steps=4) == first
    assert_same(weights(draft), before)


def test_folder_of_another_call_is_refused(llama: MakeModel, rows: MakeRows, tmp_path: Path) -> None:
    """speculators 1081, SpecForge 602: never resume for another corpus or other settings."""
    train(draft_from_layers(llama(), [0, 3]), rows(llama()), tmp_path, max_steps=2)
    with pytest.raises(ValueError, match="other rows: delete the folder"):
        train(draft_from_layers(llama(), [0, 3]), rows(llama(), seed=1), tmp_path, max_steps=2)
    with pytest.raises(ValueError, match="other train: delete"):
        train(draft_from_layers(llama(), [0, 3]), rows(llama()), tmp_path, max_steps=3)


def test_time_budget_ends_the_run_and_the_schedule(
    llama: MakeModel, rows: MakeRows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a clock that moves one second at each look, the rate falls to its floor as the minute ends."""
    now = [0.0]

    def tick() -> float:
        now[0] += 0.2
        return now[0]

    monkeypatch.setattr("distill.schedule.time.monotonic", tick)
    rates: dict[int, float] = {}
    result = train(
        draft_from_layers(llama(), [0, 3]), rows(llama()), tmp_path, max_minutes=0.5, num_epochs=500, learning_rate=1e-3,
        eval_every_steps=1000, checkpoint_every_steps=1000,
        on_metrics=lambda metrics, step: rates.update({step: metrics["learning_rate"]} if "loss" in metrics else {}),
    )
    assert 30 <= result.seconds <= 33
    assert 20 < result.num_steps < 200
    assert sorted(rates.values(), reverse=True) == list(rates.values())
    assert rates[max(rates)] < 0.2e-3


def test_nan_loss_stops_before_the_weights(llama: MakeModel, rows: MakeRows, tmp_path: Path) -> None:
    draft = draft_from_layers(llama(), [0, 3])
    clean: dict[str, torch.Tensor] = {}

    def poison(metrics: dict[str, float], step: int) -> None:
        if step == 4:
            clean.update(weights(draft))
            draft.model.norm.register_forward_hook(lambda module, args, output: output * math.nan)

    with pytest.raises(FloatingPointError, match="loss is nan at step 5.*train.learning_rate"):
        train(draft, rows(llama()), tmp_path, curve=[0.1, 0.4], max_steps=12, num_epochs=9, on_metrics=poison)
    assert_same(weights(draft), clean)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "best-4") is not None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loss": LossConfig(teacher="online")}, "loss.teacher='online' needs the target"),
        ({"vocab_ids": [3, 2]}, "ascending"),
        ({"vocab_ids": [2, 61]}, "ids 0 to 60"),
    ],
)
def test_wrong_calls_are_refused(
    change: dict[str, Any], message: str, llama: MakeModel, rows: MakeRows, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        train(llama(), rows(), tmp_path / "new", **change)
    assert not (tmp_path / "new").exists()


def test_a_corpus_without_probabilities_trains_on_its_tokens_only(
    llama: MakeModel, rows: MakeRows, tmp_path: Path
) -> None:
    """SpecForge 602's kind: data of another recipe was trained on; here every loss but cross entropy would be 0, silently."""
    corpus = rows(num_cached=0)
    with pytest.raises(ValueError, match=r"corpus.topk=0.*loss=cross_entropy"):
        train(llama(), corpus, tmp_path / "kl")
    draft = draft_from_layers(llama(), [0, 3])
    before = weights(draft)
    train(draft, corpus, tmp_path / "ce", loss=LossConfig(weights={"cross_entropy": 1.0}), max_steps=2)
    assert any(not torch.equal(value, before[name]) for name, value in weights(draft).items())


def test_padded_target_vocabulary(llama: MakeModel, rows: MakeRows, tmp_path: Path) -> None:
    """trl 3028, 2215; ModelOpt 2489: 70 ids against 61, the shared ones are compared, the rest gets no mass."""
    wide = llama(vocab_size=70)
    draft = draft_from_layers(llama(), [0, 3])
    result = train(
        draft, rows(), tmp_path / "online", loss=LossConfig(teacher="online"), target=wide, max_steps=2
    )
    assert result.num_steps == 2
    cached = train(draft_from_layers(llama(vocab_size=70), [0, 3]), rows(llama()), tmp_path / "cached", max_steps=2)
    assert cached.num_steps == 2


def test_model_is_left_with_its_own_forward(llama: MakeModel, rows: MakeRows, tmp_path: Path) -> None:
    draft = draft_from_layers(llama(), [0, 3])
    train(draft, rows(llama()), tmp_path, max_steps=1)
    assert "forward" not in vars(draft)
    shutil.rmtree(tmp_path)
