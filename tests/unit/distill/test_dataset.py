"""Packing and masks: every generated token supervised once, rows blind to each other, a stable order."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from distill.config import TrainConfig
from distill.dataset import PackedDataset, plan_epoch
from distill.packed_attention import supervised_hidden
from distill.topk import remap_ids, remap_table

VOCAB = 61


def pack_all(rows: Dataset, **settings: object) -> PackedDataset:
    return PackedDataset(rows, TrainConfig(**settings), remap_table(None, VOCAB), with_topk=True)


def test_every_generated_token_is_supervised_once(rows: Callable[..., Dataset]) -> None:
    """SpecForge 885, speculators 346: supervised count == generated count, the first generated token included."""
    corpus = rows()
    dataset = pack_all(corpus, num_epochs=1, tokens_per_step=20)
    seen: list[list[int]] = []
    for index in range(len(dataset)):
        batch = dataset[index]
        logits_at = batch["supervised_S"]
        assert len(logits_at) == len(batch["token_rows_S"]) == len(batch["topk_rows_SK"])
        seen += batch["token_rows_S"].tolist()
    generated = [token for response in corpus["response_token_ids"] for token in response]
    assert len(seen) == len(generated) == dataset.num_supervised_tokens
    assert sorted(seen) == sorted(generated)


def test_position_of_each_supervised_token_is_the_one_before_it(rows: Callable[..., Dataset]) -> None:
    corpus = rows(num_rows=3)
    batch = pack_all(corpus).pack([0, 1, 2])
    start, expected_inputs, expected_positions = 0, [], []
    for prompt, response in zip(corpus["prompt_token_ids"], corpus["response_token_ids"], strict=True):
        whole = [*prompt, *response]
        expected_inputs += whole[:-1]
        expected_positions += [start + len(prompt) - 1 + offset for offset in range(len(response))]
        start += len(whole) - 1
    assert batch["input_ids"][0].tolist() == expected_inputs
    assert batch["supervised_S"].tolist() == expected_positions


def test_eos_that_is_also_pad_is_supervised(rows: Callable[..., Dataset]) -> None:
    """trl 6357: pad == eos == 2; masks go by length, so each response's EOS is a label."""
    corpus = rows()
    dataset = pack_all(corpus, num_epochs=1)
    labels = torch.cat([dataset[index]["token_rows_S"] for index in range(len(dataset))])
    assert int((labels == 2).sum()) == len(corpus)


def tiny_gpt2() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=64))


def tiny_qwen3() -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64,
    )
    return Qwen3ForCausalLM(config)


def tiny_gemma2() -> Gemma2ForCausalLM:
    config = Gemma2Config(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64, sliding_window=5,
    )
    return Gemma2ForCausalLM(config)


@pytest.mark.parametrize("make", [tiny_gpt2, tiny_qwen3, tiny_gemma2, None])
def test_packed_equals_alone(
    make: Callable[[], torch.nn.Module] | None, llama: Callable[..., LlamaForCausalLM], rows: Callable[..., Dataset]
) -> None:
    torch.manual_seed(0)
    model = (llama() if make is None else make()).eval()
    dataset = pack_all(rows(num_rows=4))

    def alone(row: int) -> torch.Tensor:
        batch = dataset.pack([row])
        return model.base_model(input_ids=batch["input_ids"]).last_hidden_state[0, batch["supervised_S"]]

    with torch.no_grad():
        packed = supervised_hidden(model, dataset.pack([2, 0, 3, 1]))
        expected = torch.cat([alone(row) for row in (2, 0, 3, 1)])
    torch.testing.assert_close(packed, expected, rtol=1e-4, atol=1e-5)
    assert model.config._attn_implementation == "sdpa"


def test_plan_is_a_pure_function_of_seed_and_epoch() -> None:
    lengths = np.random.default_rng(0).integers(20, 200, 100).tolist()

    def plan(seed: int, epoch: int) -> list[list[int]]:
        return plan_epoch(lengths, tokens_per_step=300, num_micro=1, seed=seed, epoch=epoch)

    assert plan(0, 0) == plan(0, 0)
    assert len({str(plan(seed, epoch)) for seed in (0, 1) for epoch in (0, 1)}) == 4
    assert sorted(row for step in plan(3, 5) for row in step) == list(range(100))
    tokens = [sum(lengths[row] for row in step) for step in plan(0, 0)]
    assert abs(np.mean(tokens) - 300) < 30
    assert min(tokens) >= 150


def test_step_contents_do_not_depend_on_the_accumulation(rows: Callable[..., Dataset]) -> None:
    whole = pack_all(rows(), num_epochs=2, tokens_per_step=40)
    split = pack_all(rows(), num_epochs=2, tokens_per_step=40, gradient_accumulation_steps=2)
    assert len(split) == 2 * len(whole)
    joined = [split.plan.micro_batches[2 * i] + split.plan.micro_batches[2 * i + 1] for i in range(len(whole))]
    assert joined == whole.plan.micro_batches
    assert all(len(part) > 0 for part in split.plan.micro_batches)
    assert [split.num_tokens_of_step(i) for i in range(3)] == [len(whole[i]["supervised_S"]) for i in range(3)]


def test_budgets_cut_the_plan(rows: Callable[..., Dataset]) -> None:
    per_epoch = len(pack_all(rows(), num_epochs=1, tokens_per_step=20))
    assert len(pack_all(rows(), num_epochs=2.5, tokens_per_step=20)) in range(2 * per_epoch, 3 * per_epoch)
    assert len(pack_all(rows(), num_epochs=100, max_steps=7, tokens_per_step=20)) == 7


def test_length_limit_cuts_responses_and_counts_them(rows: Callable[..., Dataset]) -> None:
    corpus = rows()
    dataset = pack_all(corpus, num_epochs=1, max_sequence_tokens=8)
    expected = [
        max(0, min(len(response), 8 - len(prompt) + 1))
        for prompt, response in zip(corpus["prompt_token_ids"], corpus["response_token_ids"], strict=True)
    ]
    assert dataset.num_kept.tolist() == expected
    assert dataset.num_cut_tokens == sum(map(len, corpus["response_token_ids"])) - sum(expected) > 0
    for row in np.flatnonzero(dataset.num_kept):
        assert dataset.pack([int(row)])["input_ids"].shape[1] <= 8


def test_shortlist_rows(rows: Callable[..., Dataset]) -> None:
    vocab_ids = [2, 5, 9, 33]
    table = remap_table(vocab_ids, VOCAB)
    assert remap_ids(torch.tensor([2, 3, 33, 9, 60, 500]), table).tolist() == [0, -1, 3, 2, -1, -1]
    batch = PackedDataset(rows(), TrainConfig(), table, with_topk=True).pack([0])
    assert int(batch["topk_rows_SK"].max()) < 4
    assert batch["token_rows_S"][-1] == 0


def test_bad_rows_are_refused(rows: Callable[..., Dataset]) -> None:
    with pytest.raises(ValueError, match=r"lack the columns \['topk_ids'\]"):
        pack_all(rows().remove_columns("topk_ids"))
    with pytest.raises(ValueError, match="max_sequence_tokens=1"):
        pack_all(rows().filter(lambda row: len(row["prompt_token_ids"]) > 2), max_sequence_tokens=1)
    with pytest.raises(ValueError, match="gradient_accumulation_steps"):
        pack_all(rows(num_rows=2), gradient_accumulation_steps=4)
    empty = rows(num_rows=2).map(lambda row: {**row, "prompt_token_ids": []})
    with pytest.raises(ValueError, match="row 0 has an empty prompt"):
        pack_all(empty)


def test_selected_rows_are_read_in_their_own_order(rows: Callable[..., Dataset]) -> None:
    """A split is a selection by index over the stored table; offsets must follow it."""
    corpus = rows()
    picked = pack_all(corpus.select([5, 1]))
    assert picked.pack([0])["input_ids"].tolist() == pack_all(corpus).pack([5])["input_ids"].tolist()
    assert torch.equal(picked.pack([1])["topk_logp_SK"], pack_all(corpus).pack([1])["topk_logp_SK"])
