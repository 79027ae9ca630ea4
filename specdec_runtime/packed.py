"""Linear layers whose weights lie in memory as the CPU's matrix kernels want them.

An ordinary `nn.Linear` on a CPU leaves oneDNN to read, or to rearrange, row-major weights in every call. Rearranged once
(what Inductor's `freezing` does), a small batch goes faster, and a block of some positions costs what one costs, which is what
speculation lives on.
"""

import copy
import logging
from typing import Optional, TypeGuard, TypeVar, cast
from weakref import ReferenceType, WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec_runtime.medusa_heads import MedusaHeads
from specdec_runtime.memory import free_memory_bytes

Model = TypeVar("Model", PreTrainedModel, MedusaHeads)

logger = logging.getLogger("specdec_runtime")

PACKED_DTYPES = (torch.bfloat16, torch.float32)
#: oneDNN picks the layout for a number of input rows; other numbers work with it as well.
EXPECTED_ROWS = 8


class PackedLinear(nn.Module):
    """`nn.Linear` for inference, x [..., in] -> [..., out], over a rearranged copy of the weight.

    `weight` stays the row-major original, for whoever looks at it; it is not copied.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.version = _version_of(linear.weight)
        self._bias: Optional[Tensor] = None if linear.bias is None else linear.bias.detach()
        self._packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(
            linear.weight.detach().contiguous(), EXPECTED_ROWS
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        return out


def packed(model: Model, role: str) -> Model:
    """The same model with every plain `nn.Linear` packed; the model as it is where that cannot be done.

    The given model is not changed, and shares all other weights. A layer that was packed before, for another decoder, is
    not copied again. Without memory for the copies, a warning says so.
    """
    if not _has_kernels(model):
        return model
    num_bytes = packed_bytes(model)
    if num_bytes > free_memory_bytes(model.device) / 2:
        logger.warning(
            "%s: the linear layers are not packed, because the copies would take %.2f GiB, more than half of the free memory; "
            "decoding is slower (pack_weights=false ends this message)",
            role,
            num_bytes / 2**30,
        )
        return model
    return cast(Model, _repacked(model))


def _has_kernels(model: PreTrainedModel | MedusaHeads) -> bool:
    return (
        model.device.type == "cpu"
        and model.dtype in PACKED_DTYPES
        and bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    )


def packed_bytes(model: nn.Module) -> int:
    """Bytes that copies of all of its linear layers take."""
    return sum(
        module.weight.numel() * module.weight.element_size()
        for module in model.modules()
        if _is_packable(module)
    )


def _repacked(module: nn.Module) -> nn.Module:
    if _is_packable(module):
        return _packed_linear(module)
    if not module._modules:
        return module
    shared = copy.copy(module)
    shared._modules = {
        name: None if child is None else _repacked(child) for name, child in module._modules.items()
    }
    return shared


#: What is packed for decoders that are alive, so that several over one model share it.
_alive: WeakKeyDictionary[nn.Linear, ReferenceType[PackedLinear]] = WeakKeyDictionary()


def _packed_linear(linear: nn.Linear) -> PackedLinear:
    known = _alive[linear]() if linear in _alive else None
    if known is None or known.weight is not linear.weight or known.version != _version_of(linear.weight):
        known = PackedLinear(linear)
        _alive[linear] = ReferenceType(known)
    return known


def _version_of(weight: Tensor) -> int:
    """Counts the changes of a weight in place."""
    return -1 if weight.is_inference() else weight._version


def _is_packable(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Plain linear layers without hooks: subclasses (quantised, adapted) keep their own forward."""
    return type(module) is nn.Linear and module.weight.dtype in PACKED_DTYPES and not module._forward_hooks
