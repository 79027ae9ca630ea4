"""The distill stage on a tiny target: what is in memory while it trains."""

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from distill.config import OnPolicyConfig
from pipeline import stage_distill, training_phases
from pipeline.context import StageContext
from pipeline.schema import Config
from pipeline.stage_distill import run_distill
from tests.unit.pipeline.distill_samples import context_of, tiny_corpus

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, Path]:
    return tiny_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.mark.parametrize(
    ("teacher", "on_policy", "num_alive"),
    [
        ("cached", OnPolicyConfig(), {"train_draft": 0}),
        ("cached", OnPolicyConfig(max_steps=1, rows_per_step=2, max_new_tokens=2), {"train_draft": 0, "train_on_policy": 1}),
        ("online", OnPolicyConfig(), {"train_draft": 1}),
    ],
)
def test_the_target_is_in_memory_only_for_a_phase_that_asks_it(
    corpus: tuple[Config, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    teacher: str,
    on_policy: OnPolicyConfig,
    num_alive: dict[str, int],
) -> None:
    context = context_of(corpus, tmp_path / "work")
    monkeypatch.setattr(context.config.loss, "teacher", teacher)
    monkeypatch.setattr(context.config.train, "on_policy", on_policy)
    load, loaded, seen = training_phases.load_target, [], {}

    def load_seen(context: StageContext) -> Any:
        target = load(context)
        loaded.append(weakref.ref(target))
        return target

    def watched(name: str) -> Callable[..., Any]:
        function = getattr(training_phases, name)

        def phase(*args: Any, **kwargs: Any) -> Any:
            seen[name] = sum(target() is not None for target in loaded)
            return function(*args, **kwargs)

        return phase

    for module in (stage_distill, training_phases):
        monkeypatch.setattr(module, "load_target", load_seen)
    for name in ("train_draft", "train_on_policy"):
        monkeypatch.setattr(training_phases, name, watched(name))
    figures = run_distill(context)
    assert loaded
    assert seen == num_alive
    assert figures["num_steps"] == 2
