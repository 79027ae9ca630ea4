"""Every kind of `draft.init` through the stage's door: its size, what is written, and how it goes on after a kill."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import AutoConfig, PreTrainedModel

from distill.config import DraftConfig, TrainConfig
from pipeline.context import StageContext
from pipeline.initial_draft import check_draft_settings, draft_of_shape, obtain_initial_draft
from pipeline.models import load_causal_lm, resolve_target
from pipeline.tracker import Tracker
from tests.unit.pipeline.corpus_samples import tiny_config

torch.set_num_threads(1)

NUM_IDS = 320
KINDS = {
    "layers": DraftConfig(num_layers=2, layer_pattern="ends"),
    "width": DraftConfig(init="width", keep_layers=[0, 1], hidden_size=16, intermediate_size=24, num_key_value_heads=1),
    "random": DraftConfig(init="random", num_layers=3, hidden_size=16),
    "chosen": DraftConfig(init="chosen", candidates=[[0, 1], [0, 3]], candidate_steps=2),
}


def rows() -> Dataset:
    random = np.random.default_rng(0)
    columns: dict[str, list[object]] = {
        "prompt_token_ids": [], "response_token_ids": [], "topk_ids": [], "topk_logprobs": []
    }  # fmt: skip
    for _ in range(6):
        response = random.integers(3, NUM_IDS, 12).tolist()
        top = torch.log_softmax(torch.from_numpy(random.normal(size=(12, NUM_IDS))), -1).topk(4)
        for name, value in zip(
            columns, ([5, 6], response, top.indices.tolist(), top.values.tolist()), strict=True
        ):
            columns[name].append(value)
    return Dataset.from_dict(columns)


def make(tmp_path: Path, settings: DraftConfig) -> tuple[StageContext, PreTrainedModel]:
    config = tiny_config(tmp_path / "artifacts")
    config.draft, config.train = settings, TrainConfig(tokens_per_step=24, autocast_dtype="float32")
    target = resolve_target(config)
    work_dir = tmp_path / "work"
    work_dir.mkdir()
    return StageContext(config, work_dir, {}, Tracker(), target), load_causal_lm(target.path, "float32")


def obtain(context: StageContext, target: PreTrainedModel, acceptance: list[float]) -> PreTrainedModel:
    draft, _ = obtain_initial_draft(
        context, target, rows(), vocab_ids=None, acceptance_of=lambda model: acceptance.pop(0)
    )
    return draft


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_written_once_and_has_the_shape_that_preflight_times(tmp_path: Path, kind: str) -> None:
    context, target = make(tmp_path, KINDS[kind])
    # Before and after two steps of each candidate; the second one heals better.
    draft = obtain(context, target, [0.1, 0.2, 0.1, 0.3])
    shape = draft_of_shape(context.config.draft, target)
    assert {name: tensor.shape for name, tensor in draft.state_dict().items()} == {
        name: tensor.shape for name, tensor in shape.state_dict().items()
    }
    record = json.loads((context.work_dir / "init.json").read_text())
    assert record["init"] == kind
    if kind == "chosen":
        assert record["keep_layers"] == [0, 3]
        assert record["candidate_acceptance"] == {"0-1": 0.2, "0-3": 0.3}
        expected = target.model.layers[3].mlp.up_proj.weight
        assert torch.equal(draft.model.layers[1].mlp.up_proj.weight, expected)
    again = obtain(context, target, [])
    for name, tensor in draft.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)
    assert sorted(path.name for path in context.work_dir.iterdir()) == ["init.json", "undistilled"]


def test_a_killed_choice_goes_on_with_the_next_candidate(tmp_path: Path) -> None:
    context, target = make(tmp_path, KINDS["chosen"])
    with pytest.raises(IndexError):
        obtain(context, target, [0.1, 0.2])
    assert (context.work_dir / "candidates" / "0-1" / "result.json").is_file()
    draft = obtain(context, target, [0.1, 0.15])
    assert torch.equal(draft.model.layers[1].mlp.up_proj.weight, target.model.layers[1].mlp.up_proj.weight)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (DraftConfig(num_layers=5), "draft.num_layers=5: choose from 1 to 4"),
        (DraftConfig(init="width", hidden_size=33), "draft.hidden_size=33: choose from 1 to 32"),
        (DraftConfig(init="chosen", candidates=[[0, 9]]), "not .9."),
        (DraftConfig(init="random"), "train.train_embeddings=true"),
        (DraftConfig(init="random", num_key_value_heads=0), "draft.num_key_value_heads=0"),
    ],
)
def test_impossible_sizes_are_found_from_the_targets_config(
    tmp_path: Path, settings: DraftConfig, message: str
) -> None:
    config = AutoConfig.from_pretrained(resolve_target(tiny_config(tmp_path)).path)
    with pytest.raises(ValueError, match=message):
        check_draft_settings(settings, TrainConfig(), config)
    check_draft_settings(DraftConfig(init="random"), TrainConfig(train_embeddings=True), config)
