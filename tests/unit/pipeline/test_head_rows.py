"""Rows that must not win: bounds that hold for every hidden state, tried on random ones."""

import pytest
import torch

from pipeline.head_rows import confine_head, fit_vocab_size
from tests.unit.pipeline.tiny_models import NUM_TOKENS, make_model


@pytest.mark.parametrize("family", ["llama", "phi", "gpt2"])
def test_new_padding_rows_never_exceed_the_mean_logit(family: str) -> None:
    """Phi's head has a bias. The bound is Jensen's: probability of each padding id <= 1 / number of real ids."""
    model = make_model(family, seed=2)
    if family == "phi":
        model.lm_head.bias.data.normal_(0, 3)
    fit_vocab_size(model, NUM_TOKENS + 16, num_token_ids=NUM_TOKENS)
    with torch.no_grad():
        logits = model(input_ids=torch.randint(0, NUM_TOKENS, (8, 12))).logits
    real, padding = logits[..., :NUM_TOKENS], logits[..., NUM_TOKENS:]
    assert bool((padding <= real.mean(dim=-1, keepdim=True) + 1e-5).all())
    assert int(logits.argmax(dim=-1).max()) < NUM_TOKENS
    assert float(logits.softmax(dim=-1)[..., NUM_TOKENS:].max()) <= 1 / NUM_TOKENS


def test_width_below_the_tokenizer_is_refused() -> None:
    with pytest.raises(ValueError, match="below the tokenizer's 96 ids"):
        fit_vocab_size(make_model(), 95, num_token_ids=96)


@pytest.mark.parametrize("family", ["llama", "phi", "gpt2"])
def test_confined_head_changes_no_kept_logit_and_bounds_the_others(family: str) -> None:
    model = make_model(family, seed=3)
    ids_BT = torch.randint(0, NUM_TOKENS, (8, 12))
    vocab_ids = list(range(1, NUM_TOKENS, 4))
    outside = [i for i in range(NUM_TOKENS) if i not in vocab_ids]
    with torch.no_grad():
        before = model(input_ids=ids_BT).logits
        confine_head(model, vocab_ids)
        after = model(input_ids=ids_BT).logits
    torch.testing.assert_close(after[..., vocab_ids], before[..., vocab_ids], rtol=0, atol=0)
    assert bool((after[..., outside] <= after[..., vocab_ids].mean(dim=-1, keepdim=True) + 1e-5).all())
    assert set(after.argmax(dim=-1).flatten().tolist()) <= set(vocab_ids)
