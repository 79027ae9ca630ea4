"""A draft made of the target's own layers."""

import copy
import re
from collections.abc import Sequence

import numpy as np
from torch import nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel


def select_layers(
    num_target_layers: int, num_layers: int, keep_layers: Sequence[int] | None = None, *, pattern: str = "even"
) -> list[int]:
    """Indices of the target's layers that the draft keeps, ascending.

    `keep_layers` if given; otherwise `num_layers` of them by `pattern`: "even" (evenly spaced, the first and the last among
    them; a single layer is the first), "first", or "ends" (the first half from the front, the rest from the back).
    """
    if keep_layers is not None:
        outside = [index for index in keep_layers if not 0 <= index < num_target_layers]
        if outside or not keep_layers:
            raise ValueError(
                f"draft.keep_layers={list(keep_layers)}: the target has layers 0 to {num_target_layers - 1}"
                + (f", not {outside}" if outside else "; name at least one")
            )
        if list(keep_layers) != sorted(set(keep_layers)):
            raise ValueError(f"draft.keep_layers={list(keep_layers)}: list each layer once, in ascending order")
        return list(keep_layers)
    if not 1 <= num_layers <= num_target_layers:
        raise ValueError(f"draft.num_layers={num_layers}: choose from 1 to {num_target_layers}, the target's layers")
    if pattern == "first" or num_layers == 1:
        return list(range(num_layers))
    if pattern == "ends":
        num_front = (num_layers + 1) // 2
        return [*range(num_front), *range(num_target_layers - (num_layers - num_front), num_target_layers)]
    assert pattern == "even"
    return [round(position) for position in np.linspace(0, num_target_layers - 1, num_layers).tolist()]


def draft_from_layers(target: PreTrainedModel, keep_layers: Sequence[int]) -> PreTrainedModel:
    """A new model of the target's class with copies of its embeddings, its head and the layers `keep_layers`.

    Works for any causal LM whose decoder layers lie in one `nn.ModuleList`. Per-layer entries of the config
    (`layer_types` and the like) are cut to the kept layers, weights that the target ties stay tied, and the generation
    config keeps token ids only: penalties and samplers would make p and q differ from what is measured.
    """
    config = target.config.get_text_config()
    num_target_layers = int(config.num_hidden_layers)
    kept = select_layers(num_target_layers, len(keep_layers), keep_layers)
    prefix = layers_prefix(target, num_target_layers)
    draft_config = copy.deepcopy(target.config)
    cut_config(draft_config.get_text_config(), num_target_layers, kept)
    draft = type(target)._from_config(draft_config, dtype=target.dtype)
    new_index = {str(old): str(new) for new, old in enumerate(kept)}
    state = {}
    for name, tensor in target.state_dict().items():
        match = re.match(rf"{re.escape(prefix)}\.(\d+)\.", name)
        if match is None:
            state[name] = tensor
        elif match.group(1) in new_index:
            state[f"{prefix}.{new_index[match.group(1)]}.{name[match.end():]}"] = tensor
    try:
        draft.load_state_dict(state, strict=True)
    except RuntimeError as error:
        raise ValueError(
            f"draft.keep_layers={kept}: {type(target).__name__} has layers that differ by their position, so these do not "
            f"make a smaller model of the same class; keep others. {error}"
        ) from error
    draft.tie_weights()
    draft.generation_config = plain_generation_config(target)
    return draft.to(target.device).eval()


def layers_prefix(model: PreTrainedModel, num_layers: int) -> str:
    """Dotted name of the decoder's list of layers."""
    names = [
        name for name, module in model.named_modules() if isinstance(module, nn.ModuleList) and len(module) == num_layers
    ]
    tops: list[str] = [name for name in names if not any(name.startswith(other + ".") for other in names)]
    if len(tops) != 1:
        raise ValueError(
            f"target: {type(model).__name__} has {len(tops)} lists of {num_layers} layers, so its layers cannot be copied; "
            "set draft.path to a small model of the same tokenizer"
        )
    return tops[0]


def cut_config(config: PreTrainedConfig, num_layers: int, kept: Sequence[int]) -> None:
    """Set the layer count and keep the kept layers' entries of every per-layer list."""
    for name, value in list(vars(config).items()):
        per_layer = re.search(r"layer|block|rope|mlp|attention", name) is not None
        if isinstance(value, (list, tuple)) and per_layer and len(value) == num_layers:
            setattr(config, name, type(value)(value[index] for index in kept))
    config.num_hidden_layers = len(kept)
    if getattr(config, "max_window_layers", None) is not None:
        # Qwen2: how many of the first layers attend in full; layer_types above already says which.
        config.max_window_layers = sum(index < config.max_window_layers for index in kept)


def plain_generation_config(target: PreTrainedModel) -> GenerationConfig:
    """Token ids only, without penalties and samplers."""
    source = target.generation_config or target.config
    ids = {name: getattr(source, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return GenerationConfig(**{name: value for name, value in ids.items() if value is not None})
