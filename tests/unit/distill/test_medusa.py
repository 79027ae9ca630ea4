"""Training of Medusa's heads: the gradient of the plain computation, resumed runs, what is saved."""

from pathlib import Path

import pytest
import torch
from datasets import Dataset

from distill import losses
from distill.config import DraftConfig, LossConfig, TrainConfig
from distill.medusa import train_medusa
from distill.medusa_loss import HEAD_DECAY, positions_ahead
from distill.train import TrainResult
from specdec_runtime.medusa_heads import MedusaHeads, heads_of_target, load_medusa_heads
from tests.unit.distill.training_call import FAST, Killed, MakeModel, MakeRows, assert_same, weights

SHORTLIST = [1, 2, *range(5, 61, 3)]


def train(heads, target, rows: Dataset, folder: Path, *, loss=None, curve=None, on_metrics=None, **settings) -> TrainResult:
    values = list(curve or [0.0])
    return train_medusa(
        heads, target, rows, loss=loss or LossConfig(), train=TrainConfig(**{**FAST, **settings}), output_dir=folder,
        acceptance_of=lambda heads: values.pop(0) if len(values) > 1 else values[0],
        on_metrics=on_metrics or (lambda metrics, step: None),
    )


def make_heads(target, vocab_ids=None) -> MedusaHeads:
    """Away from their start, where the blocks' gradients would be special."""
    heads = heads_of_target(target, num_heads=3, num_layers=2, vocab_ids=vocab_ids)
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return heads


def one_step_gradient(llama: MakeModel, rows: Dataset, folder: Path, vocab_ids=None, **settings) -> dict[str, torch.Tensor]:
    heads, grads = make_heads(llama(), vocab_ids), {}
    for name, parameter in heads.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: grads.__setitem__(name, p.grad.clone()))
    train(heads, llama(), rows, folder, max_steps=1, max_grad_norm=1e9, **settings)
    return grads


def plain_gradient(llama: MakeModel, rows: Dataset, vocab_ids=None) -> dict[str, torch.Tensor]:
    """Row by row and position by position: head k at t against the target's distribution at t + k."""
    target = llama()
    heads = make_heads(target, vocab_ids)
    total, num_tokens = torch.zeros(()), 0
    for prompt, response in zip(rows["prompt_token_ids"], rows["response_token_ids"], strict=True):
        tokens = torch.tensor([prompt + response])
        with torch.no_grad():
            hidden = target.base_model(tokens).last_hidden_state[0]
            logp = torch.log_softmax(target(tokens).logits[0], -1)
        for t in range(len(prompt) - 1, len(prompt) + len(response) - 1):
            num_tokens += 1
            for k in (1, 2, 3):
                if t + k >= len(prompt) + len(response) - 1:
                    continue
                own = torch.log_softmax(heads(hidden[t][None])[0, k - 1], -1)
                teacher = logp[t + k] if vocab_ids is None else logp[t + k][vocab_ids]
                total = total + HEAD_DECAY**k * losses.forward_kl(teacher[None], own[None]).sum()
    names, parameters = zip(*heads.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(total / num_tokens, parameters), strict=True))


def assert_close(grads: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float) -> None:
    assert grads.keys() == expected.keys()
    for name, grad in expected.items():
        assert float((grads[name] - grad).norm() / grad.norm()) < tolerance, name


@pytest.mark.parametrize("teacher", ["cached", "online"])
def test_step_gradient_equals_the_plain_computation(teacher: str, llama: MakeModel, rows: MakeRows, tmp_path: Path) -> None:
    corpus = rows(llama(), num_rows=6, num_cached=61)
    grads = one_step_gradient(
        llama, corpus, tmp_path, tokens_per_step=10_000, head_chunk_tokens=7, loss=LossConfig(teacher=teacher)
    )
    assert_close(grads, plain_gradient(llama, corpus), 1e-4 if teacher == "online" else 2e-3)  # the cache is fp16


def test_shortlist_gradient_is_the_one_over_its_ids(llama: MakeModel, rows: MakeRows, tmp_path: Path) -> None:
    corpus = rows(llama(), num_rows=6, num_cached=61)
    grads = one_step_gradient(
        llama, corpus, tmp_path, SHORTLIST, tokens_per_step=10_000, loss=LossConfig(teacher="online")
    )
    assert_close(grads, plain_gradient(llama, corpus, SHORTLIST), 1e-4)


def test_gradient_does_not_depend_on_the_accumulation_split(llama: MakeModel, rows: MakeRows, tmp_path: Path) -> None:
    corpus = rows(llama())
    whole = one_step_gradient(llama, corpus, tmp_path / "1", tokens_per_step=60)
    for parts in (2, 4):
        split = one_step_gradient(
            llama, corpus, tmp_path / str(parts), tokens_per_step=60, gradient_accumulation_steps=parts
        )
        assert_close(split, whole, 1e-4)


def test_pairs_stay_within_a_row() -> None:
    row_S = torch.tensor([0, 0, 0, 1, 2, 2])
    assert [x.tolist() for x in positions_ahead(row_S, 1)] == [[0, 1, 4], [1, 2, 5]]
    assert [x.tolist() for x in positions_ahead(row_S, 2)] == [[0], [2]]
    assert [x.tolist() for x in positions_ahead(row_S, 9)] == [[], []]


def test_heads_learn_and_the_target_does_not_change(llama: MakeModel, rows: MakeRows, tmp_path: Path) -> None:
    target, seen = llama(), []
    before, corpus = weights(target), rows(llama(), num_rows=8)
    heads = heads_of_target(target, num_heads=2, num_layers=1)
    train(
        heads, target, corpus, tmp_path, max_steps=120, num_epochs=99, learning_rate=5e-3,
        on_metrics=lambda metrics, step: seen.append(metrics.get("loss")),
    )
    curve = [value for value in seen if value is not None]
    assert curve[-1] < 0.7 * curve[0]
    assert_same(weights(target), before)


def test_resumed_run_equals_uninterrupted(llama: MakeModel, rows: MakeRows, tmp_path: Path) -> None:
    corpus, settings = rows(llama()), {"max_steps": 11, "num_epochs": 9, "gradient_accumulation_steps": 2}
    curve = [0.1, 0.2, 0.5, 0.3]

    def kill(metrics: dict[str, float], step: int) -> None:
        if step == 8:
            raise Killed

    whole, resumed = make_heads(llama(), SHORTLIST), make_heads(llama(), SHORTLIST)
    expected = train(whole, llama(), corpus, tmp_path / "whole", curve=curve, **settings)
    with pytest.raises(Killed):
        train(make_heads(llama(), SHORTLIST), llama(), corpus, tmp_path / "killed", curve=curve[:3], on_metrics=kill, **settings)
    result = train(resumed, llama(), corpus, tmp_path / "killed", curve=curve[2:], **settings)
    assert_same(weights(resumed), weights(whole))
    assert result.curve == expected.curve == [(0, 0.1), (4, 0.2), (8, 0.5), (11, 0.3)]
    best = [load_medusa_heads(one.best_dir, "float32") for one in (expected, result)]
    assert expected.best_dir.name == "best-8"
    assert_same(weights(best[0]), weights(best[1]))
    with pytest.raises(AssertionError):
        assert_same(weights(best[0]), weights(whole))
    assert train(make_heads(llama(), SHORTLIST), llama(), corpus, tmp_path / "whole", **settings) == expected


def test_wrong_targets_and_settings_are_refused(llama: MakeModel, rows: MakeRows, tmp_path: Path) -> None:
    corpus, heads = rows(llama()), make_heads(llama())
    with pytest.raises(ValueError, match="not the target"):
        train(heads, llama(seed=5), corpus, tmp_path, max_steps=1)
    with pytest.raises(ValueError, match=r"train.train_embeddings: not for draft.init=medusa"):
        train(heads, llama(), corpus, tmp_path, max_steps=1, train_embeddings=True)
    with pytest.raises(ValueError, match="ascending order"):
        heads_of_target(llama(), num_heads=1, num_layers=1, vocab_ids=[4, 3])
    with pytest.raises(ValueError, match="draft.num_heads=None"):
        DraftConfig(init="medusa")
    with pytest.raises(ValueError, match="draft.num_heads=3"):
        DraftConfig(num_heads=3)
