"""What flows through a model on real rows: the moments that decide which widths are worth keeping.

Legend: T tokens of a row, H hidden size, I channels of an MLP, F features of a key-value group (its query heads together).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


@dataclass(frozen=True)
class LayerParts:
    """The modules of one decoder layer that pruning touches."""

    norms: tuple[nn.Module, nn.Module]
    attention: Any
    mlp: Any


@dataclass(frozen=True)
class Statistics:
    """Sums over all tokens, layer by layer.

    channel_energy_LI: squared output of each MLP channel times its squared column norm: what it adds to the residual stream.
    group_energy_LG: the same of each key-value group. stream_HH: for every norm in order (two a layer, and the last one),
    the second moment of its input, scaled to a mean square of 1, per token.
    """

    channel_energy_LI: list[Tensor]
    group_energy_LG: list[Tensor]
    stream_HH: list[Tensor]


def gather_statistics(
    model: PreTrainedModel, layers: Sequence[LayerParts], rows: Iterable[Sequence[int]], *, num_groups: int
) -> Statistics:
    """Run the rows (token ids, at least one) through the model, one by one and without cache."""
    final_norm = model.base_model.norm
    norms: list[nn.Module] = [*(norm for layer in layers for norm in layer.norms), final_norm]
    streams = [_Moment() for _ in norms]
    channels, groups = [_Energy() for _ in layers], [[_Moment() for _ in range(num_groups)] for _ in layers]
    hooks = [_watch(norm, moment.add_unit) for norm, moment in zip(norms, streams, strict=True)]
    for layer, channel, moments in zip(layers, channels, groups, strict=True):
        hooks.append(_watch(layer.mlp.down_proj, channel.add))
        hooks.append(_watch(layer.attention.o_proj, partial(_add_chunks, moments)))
    num_tokens = 0
    try:
        with torch.no_grad():
            for row in rows:
                num_tokens += len(row)
                model.base_model(input_ids=torch.tensor([list(row)], device=model.device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    assert num_tokens > 0
    return Statistics(
        [c.sum_I * layer.mlp.down_proj.weight.double().square().sum(0) for layer, c in zip(layers, channels, strict=True)],
        [_group_energy(layer, moments) for layer, moments in zip(layers, groups, strict=True)],
        [moment.sum_FF / num_tokens for moment in streams],
    )


class _Energy:
    """Sum over tokens of each squared feature."""

    sum_I: Tensor

    def add(self, x_TI: Tensor) -> None:
        energy_I = x_TI.double().square().sum(0)
        self.sum_I = energy_I if not hasattr(self, "sum_I") else self.sum_I + energy_I


class _Moment:
    """Sum over tokens of the outer product of the features."""

    sum_FF: Tensor

    def add(self, x_TF: Tensor) -> None:
        moment_FF = x_TF.double().T @ x_TF.double()
        self.sum_FF = moment_FF if not hasattr(self, "sum_FF") else self.sum_FF + moment_FF

    def add_unit(self, x_TH: Tensor) -> None:
        """Each token scaled to a mean square of 1: norms see directions, and a few huge tokens must not decide alone."""
        x_TH = x_TH.double()
        self.add(x_TH * x_TH.square().mean(-1, keepdim=True).clamp(min=1e-30).rsqrt())


def _watch(module: nn.Module, add: Callable[[Tensor], None]) -> torch.utils.hooks.RemovableHandle:
    return module.register_forward_pre_hook(lambda module, args: add(args[0].flatten(0, -2)))


def _add_chunks(moments: Sequence[_Moment], x_TF: Tensor) -> None:
    for moment, part in zip(moments, x_TF.chunk(len(moments), dim=-1), strict=True):
        moment.add(part)


def _group_energy(layer: LayerParts, moments: Sequence[_Moment]) -> Tensor:
    """trace(W M W^T) of each group's columns of the output projection."""
    weights = layer.attention.o_proj.weight.double().chunk(len(moments), dim=1)
    return torch.stack([((w @ m.sum_FF) * w).sum() for w, m in zip(weights, moments, strict=True)])
