"""The cached measurement used while training equals the full one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from eval.held_out import HeldOutAcceptance
from eval.teacher_forced import teacher_forced_acceptance
from eval.teacher_forcing import Draft

Rows = list[dict[str, Any]]


@pytest.mark.parametrize("sampler", ["probabilistic", "greedy"])
@pytest.mark.parametrize("vocab_ids", [None, [3, 5, 8, 13, 21, 34]])
def test_equals_the_full_measurement(
    make_model: Callable[..., PreTrainedModel],
    make_rows: Callable[..., Rows],
    sampler: str,
    vocab_ids: list[int] | None,
) -> None:
    target, rows = make_model(0), make_rows(8)
    held_out = HeldOutAcceptance(
        target,
        rows,
        temperatures=(0.0, 1.0),
        sampler=sampler,
        vocab_ids=vocab_ids,
        batch_tokens=50,
        chunk_positions=6,
    )
    ids = None if vocab_ids is None else torch.tensor(vocab_ids)
    for seed in (1, 2):
        draft = make_model(seed, num_layers=1)
        tables = teacher_forced_acceptance(
            target, {"d": Draft(draft, ids)}, rows, temperatures=[0.0, 1.0], samplers=[sampler]
        )
        expected = {table.temperature: table.rate().value for table in tables}
        assert held_out.rates(draft) == pytest.approx(expected, abs=1e-6)
        assert held_out(draft) == pytest.approx(sum(expected.values()) / 2, abs=1e-6)


def test_the_target_itself_scores_one(
    make_model: Callable[..., PreTrainedModel], make_rows: Callable[..., Rows]
) -> None:
    target = make_model(0)
    assert HeldOutAcceptance(target, make_rows(6), temperatures=(0.0, 1.0))(target) == 1.0


def test_the_target_runs_once_and_rows_stop_at_the_token_limit(
    make_model: Callable[..., PreTrainedModel], make_rows: Callable[..., Rows]
) -> None:
    target, rows = make_model(0), make_rows(40, temperatures=(1.0,))
    passes: list[int] = []
    target.model.layers[0].register_forward_hook(lambda *_: passes.append(1))
    held_out = HeldOutAcceptance(target, rows, temperatures=(1.0,), max_tokens=60)
    num_passes = len(passes)
    held_out(make_model(1))
    held_out(make_model(2))
    assert len(passes) == num_passes
    assert 40 < held_out.num_positions <= 60


def test_training_can_go_on_afterwards(
    make_model: Callable[..., PreTrainedModel], make_rows: Callable[..., Rows]
) -> None:
    draft = make_model(1, num_layers=1).train()
    held_out = HeldOutAcceptance(make_model(0), make_rows(4))
    before = held_out(draft)
    assert draft.training
    optimizer = torch.optim.SGD(draft.parameters(), lr=0.5)
    draft(torch.tensor([[3, 4, 5, 6]])).logits.logsumexp(-1).sum().backward()
    optimizer.step()
    assert held_out(draft) != before
