"""Candidates for `draft.init=chosen`, and the choice among them."""

from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import LlamaForCausalLM, PreTrainedModel

from distill.draft_init import candidate_layers, choose_layers, select_layers
from tests.unit.distill.training_call import MakeModel, MakeRows, train


def test_patterns() -> None:
    assert select_layers(30, 4, pattern="first") == [0, 1, 2, 3]
    assert select_layers(30, 4, pattern="ends") == [0, 1, 28, 29]
    assert select_layers(30, 3, pattern="ends") == [0, 1, 29]
    assert select_layers(5, 5, pattern="ends") == [0, 1, 2, 3, 4]
    assert select_layers(30, 1, pattern="ends") == [0]


def test_candidates() -> None:
    assert candidate_layers(30, 4) == [[0, 1, 2, 3], [0, 10, 19, 29], [0, 1, 28, 29], [0, 1, 2, 29]]
    assert candidate_layers(30, 2) == [[0, 1], [0, 29]]
    assert candidate_layers(4, 4) == [[0, 1, 2, 3]]
    assert candidate_layers(30, 4, [[0, 7], [0, 1], [0, 7]]) == [[0, 7], [0, 1]]
    with pytest.raises(ValueError, match="draft.candidates.*one depth"):
        candidate_layers(30, 4, [[0], [0, 1]])
    with pytest.raises(ValueError, match="not .30."):
        candidate_layers(30, 4, [[0, 30]])


def test_the_first_of_the_best_wins(llama: Callable[..., LlamaForCausalLM]) -> None:
    planted = {"0-1": 0.2, "0-3": 0.5, "0-2": 0.5}
    chosen = choose_layers(llama(), [[0, 1], [0, 3], [0, 2]], lambda draft, name: planted[name])
    assert chosen.keep_layers == [0, 3]
    assert chosen.acceptance == planted


def test_trained_candidates_find_the_layers_that_matter(llama: MakeModel, rows: MakeRows, tmp_path: Path) -> None:
    """In a target whose last two layers do nothing, the first two are the whole of it, and the draft needs no healing."""
    target = llama()
    for layer in target.model.layers[2:]:
        layer.self_attn.o_proj.weight.data.zero_()
        layer.mlp.down_proj.weight.data.zero_()
    corpus = rows(target, num_cached=16)

    def agreement(draft: PreTrainedModel) -> float:
        tokens = target.dummy_inputs["input_ids"] % 61
        return -float((draft(tokens).logits.softmax(-1) - target(tokens).logits.softmax(-1)).abs().sum())

    def heal(draft: PreTrainedModel, name: str) -> float:
        return train(
            draft, corpus, tmp_path / name, acceptance_of=agreement, max_steps=3, learning_rate=1e-3, eval_every_steps=3
        ).best_acceptance

    chosen = choose_layers(target, [[1, 2], [0, 3], [0, 1], [2, 3]], heal)
    assert chosen.keep_layers == [0, 1]
    assert len(chosen.acceptance) == 4
