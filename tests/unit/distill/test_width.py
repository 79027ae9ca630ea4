"""Narrower drafts: nothing changes at full size, and what is cut is what did not matter."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from distill.draft_init import draft_from_layers, narrow_draft, num_parameters, random_draft

HIDDEN, CHANNELS, GROUPS, HEAD = 24, 40, 3, 8
SIZES = {
    "vocab_size": 37, "hidden_size": HIDDEN, "intermediate_size": CHANNELS, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": GROUPS, "head_dim": HEAD, "max_position_embeddings": 64, "initializer_range": 0.3,
    "rms_norm_eps": 1e-12, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True, attention_bias=True, mlp_bias=True)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES)),
}
ROWS = [torch.randint(0, 37, (25,), generator=torch.Generator().manual_seed(seed)).tolist() for seed in range(4)]


def make(name: str) -> PreTrainedModel:
    """Random weights, with norms and biases that are not the neutral ones."""
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "norm" in key:
                parameter.uniform_(0.5, 1.5)
            elif key.endswith("bias"):
                parameter.normal_(std=0.3)
    return model


def logits_of(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor(ROWS), use_cache=False).logits


@pytest.mark.parametrize("name", MODELS)
def test_full_size_is_the_same_model(name: str) -> None:
    model = make(name)
    same = narrow_draft(
        model, ROWS, hidden_size=HIDDEN, intermediate_size=CHANNELS, num_key_value_heads=GROUPS
    )
    assert torch.equal(logits_of(same), logits_of(model))
    assert same.config.tie_word_embeddings == model.config.tie_word_embeddings
    assert num_parameters(same) == num_parameters(model)


@pytest.mark.parametrize("name", MODELS)
def test_silent_channels_and_groups_are_the_ones_cut(name: str, tmp_path: Path) -> None:
    """The full-size model with 16 channels and one group of each layer silenced gives the narrow model's logits."""
    model = make(name)
    with torch.no_grad():
        for index, layer in enumerate(model.model.layers):
            layer.mlp.down_proj.weight[:, index :: 2][:, :16] = 0
            group = slice((index + 1) * 2 * HEAD, (index + 2) * 2 * HEAD)
            layer.self_attn.o_proj.weight[:, group] = 0
    narrow = narrow_draft(model, ROWS, intermediate_size=CHANNELS - 16, num_key_value_heads=GROUPS - 1)
    torch.testing.assert_close(logits_of(narrow), logits_of(model), rtol=1e-4, atol=1e-4)
    assert narrow.model.layers[0].self_attn.q_proj.weight.shape == (4 * HEAD, HIDDEN)
    assert narrow.model.layers[0].self_attn.k_proj.weight.shape == (2 * HEAD, HIDDEN)
    assert narrow.config.tie_word_embeddings == model.config.tie_word_embeddings
    narrow.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(logits_of(loaded), logits_of(narrow), rtol=0, atol=0)


@pytest.mark.parametrize("name", MODELS)
def test_empty_directions_of_the_residual_stream_are_the_ones_cut(name: str, tmp_path: Path) -> None:
    """A stream confined to 18 of 24 directions, in no way aligned with the channels, loses nothing at hidden size 18."""
    model = make(name)
    basis = torch.linalg.qr(torch.randn(HIDDEN, 18)).Q
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "embed_tokens" in key:
                head = model.lm_head.weight.detach().clone()
                parameter.copy_(parameter @ basis @ basis.T)
                model.lm_head.weight = nn.Parameter(head)
            elif "o_proj" in key or "down_proj" in key:
                parameter.copy_(basis @ (basis.T @ parameter))
    model.config.tie_word_embeddings = False
    narrow = narrow_draft(model, ROWS, hidden_size=18)
    # The norms now see 18 numbers whose mean square is that of 24, which a scalar in their weight makes up for.
    torch.testing.assert_close(logits_of(narrow), logits_of(model), rtol=1e-3, atol=1e-3)
    assert narrow.model.embed_tokens.weight.shape == (37, 18)
    assert narrow.lm_head.weight.shape == (37, 18)
    assert narrow.config.head_dim == HEAD
    narrow.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(logits_of(loaded), logits_of(narrow), rtol=0, atol=0)


def test_more_width_keeps_more_of_the_model() -> None:
    """Against the full-size model's distribution, in a stream whose directions carry less and less."""
    model = make("mistral")
    basis = torch.linalg.qr(torch.randn(HIDDEN, HIDDEN)).Q
    fading = basis @ torch.diag(0.7 ** torch.arange(HIDDEN)) @ basis.T
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "embed_tokens" in key:
                parameter.copy_(parameter @ fading)
            elif "o_proj" in key or "down_proj" in key:
                parameter.copy_(fading @ parameter)
    reference = logits_of(model).log_softmax(-1)
    divergence = []
    for hidden_size in (6, 12, 18):
        narrow = narrow_draft(model, ROWS, hidden_size=hidden_size)
        divergence.append(float((reference.exp() * (reference - logits_of(narrow).log_softmax(-1))).sum(-1).mean()))
    assert divergence == sorted(divergence, reverse=True)
    assert divergence[-1] < 0.1 * divergence[0]


def test_cached_decoding_agrees_and_layers_combine() -> None:
    model = make("llama")
    narrow = narrow_draft(
        draft_from_layers(model, [1]), ROWS, hidden_size=16, intermediate_size=24, num_key_value_heads=1
    )
    assert narrow.config.num_hidden_layers == 1
    assert not narrow.config.tie_word_embeddings
    tokens = torch.tensor(ROWS[:1])
    with torch.no_grad():
        cache = narrow(input_ids=tokens[:, :7], use_cache=True).past_key_values
        rest = narrow(input_ids=tokens[:, 7:], past_key_values=cache, use_cache=True).logits
    torch.testing.assert_close(rest[0], logits_of(narrow)[0, 7:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"hidden_size": 25}, "draft.hidden_size=25: choose from 1 to 24"),
        ({"intermediate_size": 0}, "draft.intermediate_size=0: choose from 1 to 40"),
        ({"hidden_size": 16}, "LlamaConfig takes no model with .*6 attention heads: .*multiple"),
        ({"num_key_value_heads": 4}, "draft.num_key_value_heads=4: choose from 1 to 3"),
    ],
)
def test_sizes_beyond_the_target_are_refused(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        narrow_draft(make("llama"), ROWS, **sizes)


def test_other_architectures_are_refused() -> None:
    """Gemma's norms multiply by 1 + weight, GPT-2 has layer norms: a rotation would change what they compute."""
    gemma = Gemma2ForCausalLM(Gemma2Config(**SIZES))
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=37, n_embd=16, n_layer=2, n_head=2, n_positions=32))
    for model in (gemma, gpt2):
        with pytest.raises(ValueError, match="draft.init=width.*draft.init=layers"):
            narrow_draft(model, ROWS, hidden_size=8)


def test_random_draft_has_the_sizes_and_leaves_the_stream_alone(tmp_path: Path) -> None:
    target = make("qwen2")
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    draft = random_draft(target, num_layers=1, hidden_size=16, intermediate_size=20, num_key_value_heads=1, seed=3)
    assert torch.equal(torch.rand(1), expected)
    again = random_draft(target, num_layers=1, hidden_size=16, intermediate_size=20, num_key_value_heads=1, seed=3)
    assert torch.equal(logits_of(draft), logits_of(again))
    assert draft.model.layers[0].self_attn.q_proj.weight.shape == (2 * HEAD, 16)
    assert draft.config.vocab_size == target.config.vocab_size
    draft.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(logits_of(loaded), logits_of(draft), rtol=0, atol=0)
    with pytest.raises(ValueError, match="draft.hidden_size=0: must be at least 1"):
        random_draft(target, num_layers=1, hidden_size=0)
