"""A draft's own head over the shortlist: what is trained, what is saved, and that engines load it."""

import json
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, PhiConfig, PhiForCausalLM, PreTrainedModel

from distill.config import DraftConfig
from distill.draft_init import draft_from_layers
from distill.own_head import OwnHead
from tests.unit.distill.training_call import Killed, MakeModel, MakeRows, assert_same, train, weights

SHORTLIST = [1, 2, *range(5, 61, 3)]
OUTSIDE = sorted(set(range(61)) - set(SHORTLIST))
TOKENS = torch.arange(1, 13)[None]


def trained(llama: MakeModel, rows: Dataset, folder: Path, **settings: object):
    draft = draft_from_layers(llama(), [0, 3])
    options = {"vocab_ids": SHORTLIST, "train_head": True, "max_steps": 6, "num_epochs": 9, "curve": [0.1, 0.2, 0.3]}
    return draft, train(draft, rows, folder, **{**options, **settings})


def test_rows_of_the_shortlist_are_trained_and_nothing_else_of_the_vocabulary(
    llama: MakeModel, rows: MakeRows, tmp_path: Path
) -> None:
    before = llama().model.embed_tokens.weight
    draft, result = trained(llama, rows(llama()), tmp_path)
    saved = AutoModelForCausalLM.from_pretrained(result.best_dir)
    for model in (draft, saved):
        assert model.config.tie_word_embeddings is False
        assert torch.equal(model.model.embed_tokens.weight, before)
        assert model.lm_head.weight.shape == before.shape
        mean = model.lm_head.weight[SHORTLIST].mean(0)
        torch.testing.assert_close(model.lm_head.weight[OUTSIDE], mean.expand(len(OUTSIDE), -1))
        assert set(model(TOKENS).logits.argmax(-1).flatten().tolist()) <= set(SHORTLIST)
        assert bool((model.lm_head.weight[SHORTLIST] != before[SHORTLIST]).any(dim=1).all())
    assert_same(weights(saved), weights(draft))
    assert json.loads((result.best_dir / "config.json").read_text())["tie_word_embeddings"] is False


def test_first_gradient_of_the_head_is_the_plain_one(llama: MakeModel, rows: MakeRows, tmp_path: Path) -> None:
    """AdamW's first step moves each weight against the sign of its gradient: compared with autograd's over full logits."""
    corpus = rows(llama(), num_rows=6, num_cached=61)
    draft, _ = trained(llama, corpus, tmp_path, max_steps=1, tokens_per_step=10_000, warmup_fraction=0.0)
    start = draft_from_layers(llama(), [0, 3])
    start.lm_head.weight = torch.nn.Parameter(start.lm_head.weight.detach().clone())
    target, total = llama(), torch.zeros(())
    for prompt, response in zip(corpus["prompt_token_ids"], corpus["response_token_ids"], strict=True):
        tokens, span = torch.tensor([prompt + response]), slice(len(prompt) - 1, -1)
        p = target(tokens).logits[0, span].detach().softmax(-1)[:, SHORTLIST]
        total = total - (p * start(tokens).logits[0, span][:, SHORTLIST].log_softmax(-1)).sum()
    (grad,) = torch.autograd.grad(total, start.lm_head.weight)
    moved = (draft.lm_head.weight - start.lm_head.weight)[SHORTLIST]
    clear = grad[SHORTLIST].abs() > 1e-3
    assert float(clear.float().mean()) > 0.5
    assert torch.equal(moved.sign()[clear], -grad[SHORTLIST].sign()[clear])


def test_optimiser_holds_no_state_for_frozen_embeddings(
    llama: MakeModel, rows: MakeRows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes: list[tuple[int, ...]] = []
    real_step = torch.optim.AdamW.step

    def step(self, *args, **kwargs):
        result = real_step(self, *args, **kwargs)
        shapes[:] = [tuple(p.shape) for group in self.param_groups for p in group["params"]]
        return result

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    trained(llama, rows(llama()), tmp_path / "own", max_steps=1)
    assert (len(SHORTLIST), 32) in shapes
    assert (61, 32) not in shapes
    trained(llama, rows(llama()), tmp_path / "tied", max_steps=1, train_head=False)
    assert not {(len(SHORTLIST), 32), (61, 32)} & set(shapes)


def test_resumed_run_equals_uninterrupted(llama: MakeModel, rows: MakeRows, tmp_path: Path) -> None:
    corpus = rows(llama())
    whole, _ = trained(llama, corpus, tmp_path / "whole")

    def kill(metrics: dict[str, float], step: int) -> None:
        if step == 4:
            raise Killed

    with pytest.raises(Killed):
        trained(llama, corpus, tmp_path / "killed", on_metrics=kill, curve=[0.1, 0.2])
    resumed, result = trained(llama, corpus, tmp_path / "killed", curve=[0.2, 0.3])
    assert_same(weights(resumed), weights(whole))
    assert_same(weights(AutoModelForCausalLM.from_pretrained(result.best_dir)), weights(whole))


def test_the_draft_is_measured_with_its_trained_head(llama: MakeModel, rows: MakeRows, tmp_path: Path) -> None:
    """`acceptance_of` sees all ids, as whoever loads the saved folder does."""
    widths: list[int] = []

    def acceptance(model: PreTrainedModel) -> float:
        widths.append(model.get_output_embeddings().weight.shape[0])
        return 0.1

    trained(llama, rows(llama()), tmp_path, max_steps=4, acceptance_of=acceptance)
    assert widths == [61, 61]


def test_whole_vocabulary_and_a_head_with_bias(llama: MakeModel, rows: MakeRows, tmp_path: Path) -> None:
    draft, _ = trained(llama, rows(llama()), tmp_path, vocab_ids=None)
    assert bool((draft.lm_head.weight != draft.model.embed_tokens.weight).any(dim=1).all())
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    phi = PhiForCausalLM(PhiConfig(vocab_size=37, **sizes)).eval()
    with torch.no_grad():
        phi.lm_head.bias.normal_()
        expected = phi(TOKENS).logits
        own = OwnHead(phi, [0, 3, 9])
        torch.testing.assert_close(phi(TOKENS).logits, expected[..., [0, 3, 9]])
        own.rows.bias += 1.0
        with own.whole():
            changed = phi(TOKENS).logits
        assert phi.lm_head is own.rows
    torch.testing.assert_close(changed[..., [0, 3, 9]], expected[..., [0, 3, 9]] + 1.0)
    outside = sorted(set(range(37)) - {0, 3, 9})
    assert bool((changed[..., outside].amax(-1) <= changed[..., [0, 3, 9]].amax(-1)).all())


def test_a_shortlist_brings_a_head_of_its_own_unless_told_otherwise() -> None:
    assert not DraftConfig().has_own_head
    assert DraftConfig(vocab_shortlist=8).has_own_head
    assert not DraftConfig(vocab_shortlist=8, train_head=False).has_own_head
    assert DraftConfig(train_head=True).has_own_head
