"""Token selection: which positions are kept, what they weigh, and that nothing changes when all are."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from distill.config import LossConfig, TokenSelectionConfig, TrainConfig
from distill.dataset import PackedDataset
from distill.draft_init import draft_from_layers
from distill.loss_forward import LossForward
from distill.objective import Objective
from distill.reference import reference_losses
from distill.token_selection import rows_of_positions, select_positions, selection_weights
from distill.topk import remap_table
from tests.unit.distill.conftest import VOCAB
from tests.unit.distill.training_call import MakeModel, MakeRows, assert_same, train, weights


@pytest.mark.parametrize("keep_fraction", [0.1, 0.4, 0.5, 1.0])
def test_kept_positions_equal_brute_force(keep_fraction: float) -> None:
    random = np.random.default_rng(3)
    lengths = [10, 1, 7, 5]
    row_S = torch.from_numpy(np.repeat(range(len(lengths)), lengths))
    gain_S = torch.from_numpy(random.normal(size=len(row_S)).round(1)).float()  # rounded: some are equal
    expected = []
    for row, length in enumerate(lengths):
        gains = gain_S[row_S == row].tolist()
        num_kept = math.ceil(round(keep_fraction * length, 6))
        kept = sorted(range(length), key=lambda position, gains=gains: (-gains[position], position))[:num_kept]
        expected += [position in kept for position in range(length)]
    assert select_positions(gain_S, row_S, keep_fraction).tolist() == expected


def test_weights_keep_each_rows_total_and_are_ones_when_all_are_kept() -> None:
    row_S = torch.tensor([0, 0, 0, 1, 1, 1, 1, 1])
    gain_S = torch.tensor([0.0, 2.0, 1.0, 5.0, 4.0, 3.0, 2.0, 1.0])
    assert selection_weights(gain_S, row_S, 0.4).tolist() == [0, 1.5, 1.5, 2.5, 2.5, 0, 0, 0]
    assert selection_weights(gain_S, row_S, 1.0).tolist() == [1.0] * 8


def settings_for(keep_fraction: float) -> TrainConfig:
    selection = TokenSelectionConfig(keep_fraction=keep_fraction, reference_steps=1)
    return TrainConfig(autocast_dtype="float32", tokens_per_step=30, token_selection=selection, head_chunk_tokens=7)


@pytest.mark.parametrize("teacher", ["cached", "online"])
@pytest.mark.parametrize("vocab_ids", [None, list(range(0, VOCAB, 2))])
def test_summed_loss_is_the_weighted_sum_of_the_selected(
    teacher: str, vocab_ids: list[int] | None, llama: MakeModel, rows: MakeRows
) -> None:
    """The reference's losses are those of the same objective, in row order, and the step uses exactly the selected positions."""
    target, corpus, loss = llama(), rows(llama()), LossConfig(teacher=teacher)
    reference, draft, settings = draft_from_layers(target, [0, 3]), draft_from_layers(target, [1, 2]), settings_for(0.5)
    losses = reference_losses(reference, corpus, loss=loss, train=settings, target=target, vocab_ids=vocab_ids)
    assert [len(values) for values in losses] == [len(row["response_token_ids"]) for row in corpus]
    live = target if teacher == "online" else None
    table = remap_table(vocab_ids, VOCAB)
    dataset = PackedDataset(corpus, settings, table, with_topk=teacher == "cached")
    dataset.reference_losses = losses
    batch = dataset.pack([4, 0, 7])
    assert torch.equal(batch["reference_loss_S"], torch.from_numpy(np.concatenate([losses[row] for row in (4, 0, 7)])))

    def forward_of(model: torch.nn.Module) -> LossForward:
        return LossForward(
            model, live, Objective(loss), vocab_ids, torch.float32, 7, train_head=False, is_trimmed=False, keep_fraction=0.5
        )

    torch.testing.assert_close(forward_of(reference).position_losses(batch), batch["reference_loss_S"])
    loss_S = forward_of(draft).position_losses(batch)
    weights_S = selection_weights(loss_S - batch["reference_loss_S"], rows_of_positions(batch), 0.5)
    assert 0 < int((weights_S == 0).sum()) < len(weights_S)
    torch.testing.assert_close(forward_of(draft).summed_loss(batch), (loss_S * weights_S).sum())


def test_keeping_every_position_changes_nothing(llama: MakeModel, rows: MakeRows, tmp_path: Path) -> None:
    """Weights of 1: the same model comes out, bit by bit, whatever the reference says."""
    corpus = rows(llama())
    plain = draft_from_layers(llama(), [0, 3])
    train(plain, corpus, tmp_path / "plain", max_steps=3)
    draft, settings = draft_from_layers(llama(), [0, 3]), settings_for(1.0)
    table = remap_table(None, VOCAB)
    dataset = PackedDataset(corpus, settings, table, with_topk=True)
    batch = dataset.pack([0, 1])
    forward = LossForward(draft, None, Objective(LossConfig()), None, torch.float32, 7, train_head=False, is_trimmed=False)
    expected = forward.summed_loss(batch)
    batch["reference_loss_S"] = torch.randn(len(batch["supervised_S"]))
    torch.testing.assert_close(forward.summed_loss(batch), expected, rtol=0, atol=0)


def test_selection_trains_and_does_not_depend_on_the_split(llama: MakeModel, rows: MakeRows, tmp_path: Path) -> None:
    """trl 4719, Soup 720: the same rows in one micro-batch or in three give the same weights after a step."""
    target, corpus = llama(), rows(llama())
    after = []
    for num_micro in (1, 3):
        draft = draft_from_layers(target, [1, 2])
        settings = {"max_steps": 1, "tokens_per_step": 60, "gradient_accumulation_steps": num_micro}
        selection = TokenSelectionConfig(keep_fraction=0.4, reference_steps=1)
        config = TrainConfig(**{"autocast_dtype": "float32", **settings}, token_selection=selection)
        losses = reference_losses(draft_from_layers(target, [0, 3]), corpus, loss=LossConfig(), train=config)
        train(draft, corpus, tmp_path / str(num_micro), reference_losses=losses, token_selection=selection, **settings)
        after.append(weights(draft))
    for name, value in after[0].items():
        torch.testing.assert_close(value, after[1][name], rtol=1e-4, atol=2e-5, msg=name)
    plain = draft_from_layers(target, [1, 2])
    train(plain, corpus, tmp_path / "plain", max_steps=1, tokens_per_step=60)
    with pytest.raises(AssertionError):
        assert_same(weights(plain), after[0])


def test_selection_needs_a_reference(llama: MakeModel, rows: MakeRows, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"keep_fraction=0.5 needs a reference: set reference_steps or reference_minutes"):
        TokenSelectionConfig(keep_fraction=0.5)
    with pytest.raises(ValueError, match=r"keep_fraction=0.5 and reference_losses go together"):
        train(llama(), rows(llama()), tmp_path, token_selection=TokenSelectionConfig(keep_fraction=0.5, reference_steps=1))
