"""The chunked head: the same numbers as the whole one, without ever holding vocabulary x length."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaForCausalLM,
    PhiConfig,
    PhiForCausalLM,
)

from distill.head import LMHead, chunked_head_loss
from distill.preconditions import require_matching_forward

SIZES = {
    "vocab_size": 37, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}


def squares(logits_CV: Tensor, start: int, end: int) -> Tensor:
    """A loss that depends on the position, so that a wrong chunk offset shows."""
    return (logits_CV.log_softmax(-1) ** 2).sum(-1) * torch.arange(1, 100)[start:end]


@pytest.mark.parametrize("chunk_tokens", [1, 4, 100])
@pytest.mark.parametrize("vocab_ids", [None, [0, 3, 9, 36]])
def test_chunks_give_the_same_loss_and_gradients(chunk_tokens: int, vocab_ids: list[int] | None) -> None:
    torch.manual_seed(0)
    model = PhiForCausalLM(PhiConfig(**SIZES))  # its head has a bias
    hidden = torch.randn(11, 16, requires_grad=True)
    parameters = [hidden, model.lm_head.weight, model.lm_head.bias]
    head = LMHead.of(model, vocab_ids)
    loss = chunked_head_loss(
        hidden, head, squares, chunk_tokens=chunk_tokens, compute_dtype=torch.float32
    )
    grads = torch.autograd.grad(3.0 * loss, parameters)
    rows = slice(None) if vocab_ids is None else vocab_ids
    expected = squares(model.lm_head(hidden)[:, rows], 0, 11).sum()
    torch.testing.assert_close(loss, expected)
    for grad, wanted in zip(grads, torch.autograd.grad(3.0 * expected, parameters), strict=True):
        torch.testing.assert_close(grad, wanted, rtol=1e-3, atol=1e-4)


class WidestTensor(TorchDispatchMode):
    """Largest number of elements that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.num_elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(value, Tensor):
                self.num_elements = max(self.num_elements, value.numel())
        return result


def test_memory_does_not_grow_with_vocabulary_times_length() -> None:
    """ms-swift 10097; trl 2255, 3055: no operation ever makes a tensor of positions x vocabulary."""
    num_ids, chunk = 500, 8
    weight = torch.randn(num_ids, 4)
    widest = []
    for num_positions in (64, 256):
        hidden = torch.randn(num_positions, 4, requires_grad=True)
        with WidestTensor() as seen:
            loss = chunked_head_loss(
                hidden, LMHead(weight, None, 1.0, None), lambda logits, start, end: logits.logsumexp(-1),
                chunk_tokens=chunk, compute_dtype=torch.float32,
            )
            loss.backward()
        widest.append(seen.num_elements)
    assert widest == [chunk * num_ids] * 2


@pytest.mark.parametrize(
    "model",
    [
        GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=4.0)),
        CohereForCausalLM(CohereConfig(**SIZES, logit_scale=0.25)),
        Gemma2ForCausalLM(Gemma2Config(**SIZES, head_dim=8, final_logit_softcapping=2.0)),
    ],
    ids=["granite", "cohere", "gemma2"],
)
def test_scaled_and_capped_logits_are_the_models_own(model: torch.nn.Module) -> None:
    model.eval()
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(50)
        hidden = model.base_model(input_ids=torch.arange(9)[None]).last_hidden_state[0]
        expected = model(input_ids=torch.arange(9)[None]).logits[0]
        head = LMHead.of(model)
        torch.testing.assert_close(head.finish(head.project(hidden, torch.float32)), expected)
    require_matching_forward(model)


def test_unknown_head_is_refused_before_training(llama: Callable[..., LlamaForCausalLM]) -> None:
    model = llama()
    plain = model.forward

    def doubled(*args, **kwargs):
        output = plain(*args, **kwargs)
        output.logits = 2 * output.logits
        return output

    model.forward = doubled
    with pytest.raises(ValueError, match="chunked head does not reproduce"):
        require_matching_forward(model)


def test_rows_that_see_each_other_are_refused(llama: Callable[..., LlamaForCausalLM]) -> None:
    """Other attention than SDPA relies on the mask that Transformers derives from position_ids; without it rows leak."""
    model = llama()
    model.set_attn_implementation("eager")
    require_matching_forward(model)
    backbone = model.model.forward
    model.model.forward = lambda input_ids, position_ids, **kwargs: backbone(
        input_ids=input_ids, position_ids=position_ids, attention_mask=torch.ones_like(input_ids), use_cache=False
    )
    with pytest.raises(ValueError, match="packed rows attend to each other"):
        require_matching_forward(model)
