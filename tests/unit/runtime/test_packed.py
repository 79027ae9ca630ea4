"""Packed linear layers: the same function, over shared weights, in the layout of the CPU's kernels."""

import copy
import logging

import pytest
import torch
from torch import nn

from specdec_runtime import DecoderConfig, Request, SpeculativeDecoder
from specdec_runtime.forward import MIN_STEP_TOKENS, ModelRunner, StepOptions
from specdec_runtime.packed import PackedLinear, packed, packed_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_rows", [1, 3, 40])
def test_equals_linear(dtype, bias, num_rows):
    torch.manual_seed(0)
    linear = nn.Linear(48, 80, bias=bias).to(dtype)
    x = torch.randn(2, num_rows, 48).to(dtype)
    exact = x.double() @ linear.weight.double().T + (linear.bias.double() if bias else 0)
    error = (PackedLinear(linear)(x).double() - exact).abs().max()
    # One rounding of a sum of products of the dtype's numbers, accumulated in fp32.
    assert error < 4 * torch.finfo(dtype).eps * exact.abs().max()


def test_the_users_model_is_not_changed(llama):
    model = llama(seed=0)
    before = copy.deepcopy(model.state_dict())
    fast = packed(model, "target")
    assert isinstance(fast.model.layers[0].mlp.up_proj, PackedLinear)
    assert fast.model.embed_tokens is not None
    assert type(model.model.layers[0].mlp.up_proj) is nn.Linear
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    assert fast.get_input_embeddings().weight is model.get_input_embeddings().weight


def test_decoders_share_the_copies_until_the_weights_change(llama):
    model = llama(seed=0)
    first, second = packed(model, "target"), packed(model, "target")
    assert first.lm_head is second.lm_head
    with torch.no_grad():
        model.lm_head.weight.mul_(2.0)
    third = packed(model, "target")
    assert third.lm_head is not second.lm_head
    x = torch.randn(4, 32)
    torch.testing.assert_close(third.lm_head(x), model.lm_head(x))


def test_bytes_of_the_copies(llama):
    model = llama(seed=0, num_layers=2, vocab_size=97)  # hidden 32, 4 heads of 8, 2 kv heads, inner size 64
    per_layer = 2 * 32 * 32 + 2 * 16 * 32 + 3 * 64 * 32
    assert packed_bytes(model) == 4 * (2 * per_layer + 97 * 32)


def test_without_memory_the_model_stays_as_it_is(llama, monkeypatch, caplog):
    model = llama(seed=0)
    monkeypatch.setattr("specdec_runtime.packed.free_memory_bytes", lambda device: packed_bytes(model))
    with caplog.at_level(logging.WARNING, "specdec_runtime"):
        assert packed(model, "target") is model
    assert "pack_weights=false" in caplog.text


def test_hooks_and_subclasses_keep_their_forward(llama):
    class Doubling(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    model = llama(seed=0)
    mlp = model.model.layers[0].mlp
    mlp.up_proj.register_forward_hook(lambda module, args, out: out + 1)
    mlp.gate_proj.__class__ = Doubling
    fast = packed(model, "target").model.layers[0].mlp
    assert fast.up_proj is mlp.up_proj
    assert fast.gate_proj is mlp.gate_proj


@pytest.mark.parametrize("num_logits", [None, 1, 2])
def test_padded_steps_give_the_logits_of_the_real_tokens(llama, num_logits):
    model = llama(seed=0)
    ids = torch.tensor([[5, 6, 7, 8, 9, 10]])
    runner = ModelRunner(model, "target", StepOptions(pack_weights=True))
    runner.allocate(1, 16)
    runner.forward(ids[:, :4], torch.tensor([0]), num_cached=4, num_logits=0)
    with torch.inference_mode():
        # Twice: what the padding wrote behind the block is overwritten.
        runner.step(ids[:, 4:5], torch.tensor([4]), num_cached=5)
        logits = runner.step(ids[:, 4:6], torch.tensor([4]), num_cached=6, num_logits=num_logits)
        expected = model(ids).logits[:, 4:]
    torch.testing.assert_close(logits, expected[:, 2 - (num_logits or 2) :], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("num_rows", range(1, 6))
def test_steps_have_at_least_so_many_tokens(llama, num_rows, monkeypatch):
    runner = ModelRunner(llama(seed=0), "target", StepOptions(pack_weights=True))
    runner.allocate(num_rows, 16)
    shapes = []
    right = runner._compute
    monkeypatch.setattr(
        runner, "_compute", lambda model, ids, *args: (shapes.append(ids.shape), right(model, ids, *args))[1]
    )
    runner.step(
        torch.ones(num_rows, 1, dtype=torch.long), torch.zeros(num_rows, dtype=torch.long), num_cached=1
    )
    rows, width = shapes[0]
    assert rows == num_rows
    assert rows * (width - 1) < MIN_STEP_TOKENS <= rows * width


@pytest.mark.parametrize("gamma", [1, 2, 4])
def test_bf16_equals_plain_decoding_token_by_token(llama, gamma):
    """vllm 41758, 54506: no forward is so narrow that it takes another kernel, so widths 1 and gamma + 1 round alike."""
    shape = {"hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 2, "initializer_range": 0.1}
    target, draft = (llama(seed=s, num_layers=4, vocab_size=512, **shape).bfloat16() for s in (0, 5))
    requests = [Request([7, 8, n], 100, ignore_eos=True) for n in range(3, 7)]
    plain = SpeculativeDecoder(target, None, DecoderConfig(max_batch_size=1)).generate(requests)
    config = DecoderConfig(num_speculative_tokens=gamma, max_batch_size=1)
    speculative = SpeculativeDecoder(target, draft, config).generate(requests)
    assert [o.token_ids for o in speculative] == [o.token_ids for o in plain]
