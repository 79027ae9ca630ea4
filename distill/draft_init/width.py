"""A narrower copy of a draft: fewer MLP channels, fewer attention groups, a smaller residual stream.

Channels and groups that add least to the residual stream on real rows are left out (as in Minitron, arXiv 2407.14679). The
residual stream is turned to its principal directions and cut there (SliceGPT, arXiv 2401.15024), with one rotation for the
whole model, so that the result is an ordinary model of the same class and any engine loads it. Each norm's weight goes into
the projections behind it; a scalar takes its place, which makes up for the energy that the cut took from the root mean square.

Legend: H hidden size before and K after, G key-value groups, I MLP channels.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from distill.draft_init.layers import layers_prefix
from distill.draft_init.sizes import check_narrower, head_dim, sized_config
from distill.draft_init.statistics import LayerParts, Statistics, gather_statistics

State = dict[str, Tensor]
IN_PROJECTIONS = (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj"))
OUT_PROJECTIONS = ("self_attn.o_proj", "mlp.down_proj")
NORMS = ("input_layernorm", "post_attention_layernorm")
OPTIONAL = ("self_attn.q_norm", "self_attn.k_norm")


def narrow_draft(
    draft: PreTrainedModel,
    rows: Iterable[Sequence[int]],
    *,
    hidden_size: int | None = None,
    intermediate_size: int | None = None,
    num_key_value_heads: int | None = None,
) -> PreTrainedModel:
    """A new model of the draft's class with these sizes; None keeps the draft's, and at full size nothing changes.

    Args:
        draft: of the Llama kind (Llama, Qwen2, Qwen3, Mistral, SmolLM): RMS norms before attention and a gated MLP.
        rows: token ids of texts like those to be drafted; some thousand tokens are enough.
        num_key_value_heads: a key-value head leaves together with the query heads that share it.

    A smaller hidden size needs an output head of its own, so weights that the draft ties are taken apart. Sums are fp64.

    Raises:
        ValueError: a size beyond the draft's, or another kind of architecture.
    """
    text = draft.config.get_text_config()
    sizes = {
        "hidden_size": hidden_size, "intermediate_size": intermediate_size, "num_key_value_heads": num_key_value_heads,
    }
    check_narrower(draft.config, sizes)
    layers = _layers(draft)
    config = sized_config(draft.config, **sizes)
    num_groups = int(text.num_key_value_heads)
    wide = _float_copy(draft)
    found = gather_statistics(wide, _layers(wide), rows, num_groups=num_groups)
    state: State = {name: tensor.double() for name, tensor in wide.state_dict().items()}
    small = config.get_text_config()
    prefix = layers_prefix(draft, len(layers))
    for index in range(len(layers)):
        layer = f"{prefix}.{index}"
        _keep_channels(state, layer, _top(found.channel_energy_LI[index], int(small.intermediate_size)))
        kept = _top(found.group_energy_LG[index], int(small.num_key_value_heads))
        _keep_groups(state, layer, kept, num_groups=num_groups, dim=head_dim(text))
    if small.hidden_size < text.hidden_size:
        _cut_stream(state, prefix, found, int(small.hidden_size))
        config.tie_word_embeddings = small.tie_word_embeddings = False
    narrow: PreTrainedModel = type(draft)._from_config(config, dtype=draft.dtype)
    narrow.load_state_dict({name: tensor.to(draft.dtype) for name, tensor in state.items()}, strict=True)
    narrow.tie_weights()
    narrow.generation_config = draft.generation_config
    return narrow.to(draft.device).eval()


def _float_copy(model: PreTrainedModel) -> PreTrainedModel:
    wide: PreTrainedModel = type(model)._from_config(model.config, dtype=torch.float32)
    wide.load_state_dict(model.state_dict())
    return wide.to(model.device).eval()


def _top(energy: Tensor, num_kept: int) -> Tensor:
    """Indices of the largest, ascending."""
    return energy.argsort(descending=True, stable=True)[:num_kept].sort().values


def _keep_channels(state: State, layer: str, kept_I: Tensor) -> None:
    for name in ("gate_proj", "up_proj"):
        _take(state, f"{layer}.mlp.{name}", kept_I, dim=0)
    _take(state, f"{layer}.mlp.down_proj", kept_I, dim=1)


def _keep_groups(state: State, layer: str, kept_G: Tensor, *, num_groups: int, dim: int) -> None:
    def features(width: int) -> Tensor:
        return torch.arange(num_groups * width, device=kept_G.device).view(num_groups, width)[kept_G].flatten()

    num_query_features = state[f"{layer}.self_attn.q_proj.weight"].shape[0] // num_groups
    for name, width in (("q_proj", num_query_features), ("k_proj", dim), ("v_proj", dim)):
        _take(state, f"{layer}.self_attn.{name}", features(width), dim=0)
    _take(state, f"{layer}.self_attn.o_proj", features(num_query_features), dim=1)


def _take(state: State, module: str, kept: Tensor, *, dim: int) -> None:
    state[f"{module}.weight"] = state[f"{module}.weight"].index_select(dim, kept)
    if dim == 0 and f"{module}.bias" in state:
        state[f"{module}.bias"] = state[f"{module}.bias"][kept]


def _cut_stream(state: State, prefix: str, found: Statistics, hidden_size: int) -> None:
    """Rotate the residual stream to the principal directions of what the norms see, and keep the first `hidden_size`."""
    mean_HH = torch.stack(found.stream_HH).mean(0)
    basis_HK = torch.linalg.eigh(mean_HH).eigenvectors.flip(1)[:, :hidden_size]
    stem = prefix.rpartition(".")[0]
    scales = [_kept_scale(moment, basis_HK) for moment in found.stream_HH]
    for index in range((len(found.stream_HH) - 1) // 2):
        layer = f"{prefix}.{index}"
        for place, (norm, projections) in enumerate(zip(NORMS, IN_PROJECTIONS, strict=True)):
            _fold(state, f"{layer}.{norm}", [f"{layer}.{name}" for name in projections], basis_HK, scales[2 * index + place])
        for name in OUT_PROJECTIONS:
            for key in (f"{layer}.{name}.weight", f"{layer}.{name}.bias"):
                if key in state:
                    state[key] = basis_HK.T @ state[key]
    _fold(state, f"{stem}.norm", ["lm_head"], basis_HK, scales[-1])
    state[f"{stem}.embed_tokens.weight"] = state[f"{stem}.embed_tokens.weight"] @ basis_HK


def _kept_scale(moment_HH: Tensor, basis_HK: Tensor) -> float:
    """Root mean square of the kept directions over that of all, as the norms see them."""
    kept = ((moment_HH @ basis_HK) * basis_HK).sum() / basis_HK.shape[1]
    return float((kept / (moment_HH.trace() / moment_HH.shape[0])).sqrt())


def _fold(state: State, norm: str, projections: Sequence[str], basis_HK: Tensor, scale: float) -> None:
    gamma_H = state[f"{norm}.weight"]
    for name in projections:
        state[f"{name}.weight"] = (state[f"{name}.weight"] * gamma_H) @ basis_HK
    state[f"{norm}.weight"] = torch.full((basis_HK.shape[1],), scale, dtype=gamma_H.dtype, device=gamma_H.device)


def _layers(model: PreTrainedModel) -> list[LayerParts]:
    """The decoder layers' parts; raises ValueError for an architecture that is not of the Llama kind."""
    text = model.config.get_text_config()
    modules = dict(model.named_modules())
    layers = modules[layers_prefix(model, int(text.num_hidden_layers))]
    known = {*NORMS, *OPTIONAL, *OUT_PROJECTIONS, *(name for names in IN_PROJECTIONS for name in names)}
    parts = []
    for layer in layers.children():
        names = {name.rpartition(".")[0] for name, _ in layer.named_parameters()}
        norms = [getattr(layer, name, None) for name in NORMS]
        if not known - set(OPTIONAL) <= names <= known or not all(norm is not None and _is_rms(norm) for norm in norms):
            _refuse(model)
        parts.append(LayerParts((layer.input_layernorm, layer.post_attention_layernorm), layer.self_attn, layer.mlp))
    final = getattr(model.base_model, "norm", None)
    if final is None or not _is_rms(final) or not hasattr(model, "lm_head"):
        _refuse(model)
    return parts


def _is_rms(norm: nn.Module) -> bool:
    """Whether the norm is x / rms(x) * weight, which commutes with a rotation."""
    weight = getattr(norm, "weight", None)
    if weight is None or getattr(norm, "bias", None) is not None:
        return False
    x_H = torch.linspace(-1.0, 2.0, weight.shape[0], device=weight.device, dtype=weight.dtype)
    with torch.no_grad():
        expected_H = x_H.float() * x_H.float().square().mean().rsqrt() * weight.float()
        return torch.allclose(norm(x_H).float(), expected_H, rtol=2e-2, atol=1e-2)


def _refuse(model: PreTrainedModel) -> None:
    raise ValueError(
        f"draft.init=width: {type(model).__name__} is not of the Llama kind (RMS norms before attention and before a gated MLP), "
        "so its width cannot be pruned; choose draft.init=layers, or set draft.path"
    )
