"""The last hidden states of a forward, for drafters that propose from them.

Shape legend: B rows, L positions of the block, H hidden size.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor
from transformers import PreTrainedModel


@contextmanager
def watching_hidden(model: PreTrainedModel, *, wanted: bool) -> Iterator[list[Tensor]]:
    """Within it, a forward's last hidden states [B, L, H], which the head reads, are put into the list where they are wanted.

    They are taken from the base model's output, which all architectures name alike: `output_hidden_states` would keep those of
    every layer.
    """
    seen: list[Tensor] = []
    if not wanted:
        yield seen
        return
    hook = model.base_model.register_forward_hook(lambda module, args, out: seen.append(out.last_hidden_state))
    try:
        yield seen
    finally:
        hook.remove()
