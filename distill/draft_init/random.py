"""A draft of the target's class with random weights."""

import copy

import torch
from transformers import PreTrainedModel

from distill.draft_init.layers import cut_config, plain_generation_config, select_layers
from distill.draft_init.sizes import sized_config


def random_draft(
    target: PreTrainedModel,
    *,
    num_layers: int,
    hidden_size: int | None = None,
    intermediate_size: int | None = None,
    num_key_value_heads: int | None = None,
    seed: int = 0,
) -> PreTrainedModel:
    """A model of the target's class, dtype and vocabulary with weights drawn as its architecture initialises them.

    Sizes that are None are the target's. The caller's random stream is left as it was.

    Raises:
        ValueError: a size that the architecture cannot have.
    """
    config = copy.deepcopy(target.config)
    text = config.get_text_config()
    cut_config(text, text.num_hidden_layers, select_layers(text.num_hidden_layers, num_layers, pattern="first"))
    sizes = {"intermediate_size": intermediate_size, "num_key_value_heads": num_key_value_heads}
    config = sized_config(config, hidden_size=hidden_size, **sizes)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        draft: PreTrainedModel = type(target)._from_config(config, dtype=target.dtype)
    draft.generation_config = plain_generation_config(target)
    return draft.to(target.device).eval()
