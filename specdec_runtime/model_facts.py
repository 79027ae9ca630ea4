"""What the runtime has to know of a model before it runs it: whether it can, how long its sequences may be, what they take."""

from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache


def require_attention_interface(model: PreTrainedModel, role: str) -> None:
    """Raises ValueError for a model whose attention the runtime cannot mask. role: "target" or "draft"."""
    if not getattr(model, "_supports_attention_backend", False):
        raise ValueError(
            f"{role} {type(model).__name__}: its attention does not go through Transformers' attention interface, so the "
            "runtime cannot mask it per row; use an architecture that does (Llama, Qwen, Mistral, Gemma, Phi, GPT-2, ...)"
        )


def context_of(config: Any) -> int:
    """Positions that a sequence may have. Where rotary frequencies change with the longest row of a batch ("dynamic",
    "longrope"), it ends where they would, because rows must not change each other."""
    context = getattr(config, "max_position_embeddings", None) or 2**31
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") in ("dynamic", "longrope"):
        original = rope.get("original_max_position_embeddings") or getattr(
            config, "original_max_position_embeddings", None
        )
        context = min(context, original or context)
    return int(context)


def kv_bytes_per_position(model: PreTrainedModel) -> int:
    """Bytes of keys and values that one position takes over all layers, read off a one-token forward.

    Raises:
        ValueError: the model keeps state that cannot be rolled back by position.
    """
    refuse_unrollable(model)
    cache = DynamicCache()
    ids = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    with torch.inference_mode():
        model(input_ids=ids, past_key_values=cache, use_cache=True)
    layers = [layer for layer in cache.layers if layer.keys is not None and layer.values is not None]
    if len(layers) != model.config.get_text_config().num_hidden_layers:
        raise ValueError(
            f"{type(model).__name__}: {len(layers)} of {model.config.num_hidden_layers} layers keep keys and values in the "
            "cache; speculative decoding needs all of them there to roll back"
        )
    return sum(x.numel() * x.element_size() for layer in layers for x in (layer.keys, layer.values))


# Architectures whose attention hands its window to the attention function, where the mask is narrowed (tested one by one).
WINDOWED_MODEL_TYPES = frozenset({"mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3"})


def refuse_unrollable(model: PreTrainedModel) -> None:
    """Refuses recurrent state, and sliding windows of architectures whose masks the runtime does not narrow itself.

    A window is no trouble for the cache, which keeps all positions; what matters is that the mask is right.
    """
    config = model.config.get_text_config()
    layer_types = set(getattr(config, "layer_types", None) or ["full_attention"])
    recurrent = layer_types - {"full_attention", "sliding_attention"}
    if getattr(model, "_is_stateful", False) or recurrent:
        raise ValueError(
            f"{type(model).__name__} keeps state that cannot be rolled back ({sorted(recurrent) or 'recurrent'}): rejected "
            "tokens would stay in it. Use a model whose layers all have ordinary or sliding attention"
        )
    window = getattr(config, "sliding_window", None)
    uses_window = "sliding_attention" in layer_types or (
        window is not None and getattr(config, "layer_types", None) is None
    )
    if uses_window and window is not None and config.model_type not in WINDOWED_MODEL_TYPES:
        raise ValueError(
            f"{type(model).__name__} attends over a sliding window of {window} in a way that the runtime does not know; "
            f"known are {sorted(WINDOWED_MODEL_TYPES)}"
        )
