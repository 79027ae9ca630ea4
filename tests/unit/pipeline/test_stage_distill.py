"""The distill stage on a tiny target: what is in memory while it trains."""

import json
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from distill.config import OnPolicyConfig, TokenSelectionConfig
from eval.held_out import HeldOutAcceptance
from pipeline import models, stage_distill, training_phases
from pipeline.context import StageContext, load_target
from pipeline.corpus.policy import share_temperatures
from pipeline.held_out import corpus_parts
from pipeline.models import load_causal_lm
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


@pytest.mark.parametrize("sampler", [None, "greedy"])
def test_the_checkpoint_is_chosen_for_the_sampler_that_will_be_served(
    corpus: tuple[Config, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sampler: str | None
) -> None:
    """vllm 40149: a draft that is served by its argmax was judged by its softmax."""
    context = context_of(corpus, tmp_path / "work")
    monkeypatch.setattr(context.config.train, "eval_sampler", sampler)
    run_distill(context)
    record = json.loads((context.work_dir / "train.json").read_text())
    rates = {
        name: HeldOutAcceptance(
            load_target(context), corpus_parts(context).validation, sampler=name,
            temperatures=share_temperatures(context.config.corpus),
        )(load_causal_lm(str(context.work_dir / "draft"), "float32"))
        for name in ("probabilistic", "greedy")
    }  # fmt: skip
    assert record["best_acceptance"] == pytest.approx(rates[sampler or "probabilistic"], abs=1e-5)
    assert rates["greedy"] != pytest.approx(rates["probabilistic"], abs=1e-3)


def test_a_target_of_its_own_code_is_trusted_in_every_phase(
    corpus: tuple[Config, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The phases after the first read drafts of the target's class, and its tokenizer: they failed after hours of corpus and training."""
    context = context_of(corpus, tmp_path / "work")
    context = replace(context, target=replace(context.target, trust_remote_code=True))
    monkeypatch.setattr(context.config.target, "trust_remote_code", True)
    monkeypatch.setattr(context.config.draft, "vocab_shortlist", 64)
    monkeypatch.setattr(context.config.train, "token_selection", TokenSelectionConfig(keep_fraction=0.5, reference_steps=1))
    monkeypatch.setattr(context.config.train, "on_policy", OnPolicyConfig(max_steps=1, rows_per_step=2, max_new_tokens=2))
    trusted: dict[str, list[bool]] = {}

    def watched(auto: Any) -> SimpleNamespace:
        def from_pretrained(path: str, **settings: Any) -> Any:
            trusted.setdefault(auto.__name__, []).append(settings["trust_remote_code"])
            return auto.from_pretrained(path, **settings)

        return SimpleNamespace(from_pretrained=from_pretrained)

    for auto in (AutoModelForCausalLM, AutoTokenizer):
        monkeypatch.setattr(models, auto.__name__, watched(auto))
    run_distill(context)
    assert {name: set(values) for name, values in trusted.items()} == {"AutoModelForCausalLM": {True}, "AutoTokenizer": {True}}
    assert len(trusted["AutoModelForCausalLM"]) >= 4, "the target, the first draft, the reference, the offline draft"
