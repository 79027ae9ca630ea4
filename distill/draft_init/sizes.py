"""How large a model is, and the config of one of another size."""

import copy
from collections.abc import Mapping

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig, PreTrainedModel


def num_parameters(model: PreTrainedModel) -> int:
    """Parameters of the model, tied ones once."""
    unique: dict[int, torch.Tensor] = {parameter.data_ptr(): parameter for parameter in model.parameters()}
    return sum(parameter.numel() for parameter in unique.values())


def sized_config(
    config: PreTrainedConfig,
    *,
    hidden_size: int | None = None,
    intermediate_size: int | None = None,
    num_key_value_heads: int | None = None,
) -> PreTrainedConfig:
    """A copy of `config` with these sizes; None keeps the present one.

    The size of one head stays, because rotary frequencies go by it, and so does the number of query heads per key-value
    head.

    Raises:
        ValueError: a size is below 1, the architecture has no such size, or the sizes do not go together (Llama wants a
            hidden size that is a multiple of its number of heads).
    """
    sizes = {
        "hidden_size": hidden_size, "intermediate_size": intermediate_size, "num_key_value_heads": num_key_value_heads,
    }
    given = {name: size for name, size in sizes.items() if size is not None}
    sized = copy.deepcopy(config)
    text = sized.get_text_config()
    for name, size in given.items():
        if getattr(text, name, None) is None:
            raise ValueError(f"draft.{name}={size}: {type(text).__name__} has no {name}; leave it null, or set draft.path")
        if size < 1:
            raise ValueError(f"draft.{name}={size}: must be at least 1, or null for the target's")
    if not given:
        return sized
    heads = int(text.num_attention_heads)
    kv_heads = int(getattr(text, "num_key_value_heads", None) or heads)
    text.head_dim = head_dim(text)
    for name, size in given.items():
        setattr(text, name, size)
    if num_key_value_heads is not None:
        text.num_attention_heads = heads // kv_heads * num_key_value_heads
    try:
        sized.validate()
    except StrictDataclassError as error:
        raise ValueError(
            f"draft: {type(text).__name__} takes no model with {given}, {text.num_attention_heads} attention heads: "
            + " ".join(str(error).split())
        ) from error
    return sized


def check_narrower(config: PreTrainedConfig, sizes: Mapping[str, int | None]) -> None:
    """Raise ValueError unless every given size is one that `config`'s model has as many of."""
    text = config.get_text_config()
    for name, size in sizes.items():
        most = getattr(text, name, None)
        if size is not None and most is not None and not 1 <= size <= most:
            raise ValueError(f"draft.{name}={size}: choose from 1 to {most}, the target's")


def head_dim(config: PreTrainedConfig) -> int:
    """Size of one attention head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
