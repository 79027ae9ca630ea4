"""The gradient of one optimiser step: the plain computation's, however it is packed, chunked, cached and split."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from transformers import PreTrainedModel

from distill import losses
from distill.config import LossConfig, TrainConfig
from distill.draft_init import draft_from_layers
from distill.train import train_draft
from tests.unit.distill.training_call import FAST, MakeModel, MakeRows, train


def one_step_gradient(llama: MakeModel, rows: Dataset, folder: Path, **settings: object) -> dict[str, torch.Tensor]:
    """Weight change of one step of plain SGD-like size, as seen by AdamW's first moment: here the raw gradient."""
    draft = draft_from_layers(llama(), [0, 3])
    grads: dict[str, torch.Tensor] = {}
    for name, parameter in draft.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: grads.__setitem__(name, p.grad.clone()))
    train(draft, rows, folder, max_steps=1, max_grad_norm=1e9, **settings)
    return grads


def test_gradient_does_not_depend_on_the_accumulation_split(llama: MakeModel, rows: MakeRows, tmp_path: Path) -> None:
    """trl 4719, Soup 720: normalised by all supervised tokens of the step, not by micro-batch."""
    corpus = rows(llama())
    whole = one_step_gradient(llama, corpus, tmp_path / "1", tokens_per_step=60)
    for parts in (2, 4):
        split = one_step_gradient(
            llama, corpus, tmp_path / str(parts), tokens_per_step=60, gradient_accumulation_steps=parts
        )
        assert split.keys() == whole.keys()
        for name, grad in whole.items():
            torch.testing.assert_close(split[name], grad, rtol=1e-4, atol=1e-6)


def plain_gradient(llama: MakeModel, rows: Dataset, loss: Callable[..., torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same step written out: one row at a time, full logits, mean over all generated tokens."""
    draft = draft_from_layers(llama(), [0, 3]).requires_grad_(True)
    target, total, num_tokens = llama(), torch.zeros(()), 0
    for prompt, response in zip(rows["prompt_token_ids"], rows["response_token_ids"], strict=True):
        tokens, span = torch.tensor([prompt + response]), slice(len(prompt) - 1, -1)
        with torch.no_grad():
            target_logp = torch.log_softmax(target(tokens).logits[0, span], -1)
        total = total + loss(target_logp, torch.log_softmax(draft(tokens).logits[0, span], -1)).sum()
        num_tokens += len(response)
    names, parameters = zip(*draft.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(total / num_tokens, parameters), strict=True))


@pytest.mark.parametrize("teacher", ["cached", "online"])
@pytest.mark.parametrize("train_embeddings", [False, True])
def test_step_gradient_equals_the_plain_computation(
    teacher: str, train_embeddings: bool, llama: MakeModel, rows: MakeRows, tmp_path: Path
) -> None:
    """Packing, gathering, chunking and caching together change nothing; a frozen embedding gets no gradient."""
    corpus = rows(llama(), num_rows=6, num_cached=61)
    grads = one_step_gradient(
        llama, corpus, tmp_path, tokens_per_step=10_000, head_chunk_tokens=7, train_embeddings=train_embeddings,
        loss=LossConfig(teacher=teacher), target=llama() if teacher == "online" else None,
    )
    expected = plain_gradient(llama, corpus, losses.forward_kl)
    if not train_embeddings:
        del expected["model.embed_tokens.weight"]
    assert grads.keys() == expected.keys()
    tolerance = 1e-5 if teacher == "online" else 2e-3  # the cache is fp16
    for name, grad in expected.items():
        assert float((grads[name] - grad).norm() / grad.norm()) < tolerance, name


def test_shortlist_gradient_is_the_one_over_its_rows(llama: MakeModel, rows: MakeRows, tmp_path: Path) -> None:
    """Cached and live teacher agree on a trimmed head, where part of the target's mass is out of reach."""
    corpus = rows(llama(), num_rows=6, num_cached=61)
    vocab_ids = [1, 2, *range(5, 61, 3)]
    options = {"vocab_ids": vocab_ids, "tokens_per_step": 10_000}
    cached = one_step_gradient(llama, corpus, tmp_path / "c", **options)
    live = one_step_gradient(
        llama, corpus, tmp_path / "o", loss=LossConfig(teacher="online"), target=llama(), **options
    )

    def trimmed(target_logp: torch.Tensor, draft_logp: torch.Tensor) -> torch.Tensor:
        logq = torch.log_softmax(draft_logp[:, vocab_ids], -1)
        return -(target_logp[:, vocab_ids].exp() * logq).sum(-1)

    expected = plain_gradient(llama, corpus, trimmed)
    for name, grad in live.items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-4, atol=1e-6)
        assert float((cached[name] - grad).norm() / grad.norm()) < 2e-3


def test_every_loss_learns(llama: MakeModel, rows: MakeRows, tmp_path: Path) -> None:
    """A few steps of each loss raise the overlap with the target on the training rows."""
    target = llama()
    corpus = rows(target, num_rows=8, num_cached=16)

    def overlap(model: PreTrainedModel) -> float:
        tokens = torch.tensor([corpus[0]["prompt_token_ids"] + corpus[0]["response_token_ids"]])
        with torch.no_grad():
            pair = [torch.log_softmax(m(tokens).logits[0], -1) for m in (target, model)]
        return float(1 - losses.tv(*pair).mean())

    for name in ("forward_kl", "reverse_kl", "jsd", "tv", "nla", "lk_hybrid"):
        result = train_draft(
            draft_from_layers(target, [0, 3]), corpus, loss=LossConfig(weights={name: 0.9, "cross_entropy": 0.1}),
            train=TrainConfig(**{**FAST, "eval_every_steps": 100}, max_steps=8, num_epochs=99, learning_rate=5e-3),
            output_dir=tmp_path / name, acceptance_of=overlap,
        )
        assert result.curve[-1][1] > result.curve[0][1] + 0.02, name
