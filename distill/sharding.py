"""A draft in parts: sharding it over processes, putting it together for measuring, and checkpoints in parts.

Legend: V ids of the vocabulary, N ids of the shortlist, H hidden size.
"""

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import fully_shard
from transformers import PreTrainedModel

from distill.head import LMHead
from distill.own_head import OwnHead


def shard(model: PreTrainedModel) -> None:
    """Give each process its part of every weight, in place (FSDP2): decoder layers are gathered one by one, the rest as one.

    accelerate's own FSDP2 preparation is not used: it gathers the head when the head is called, and the chunked loss reads
    the head's weight without calling it. In the model's own group it is there throughout the forward pass.

    Raises:
        ValueError: the architecture does not say what its decoder layers are.
    """
    for layer in _layers(model):
        fully_shard(layer)
    fully_shard(model)


def shard_teacher(target: PreTrainedModel, device: torch.device) -> LMHead:
    """Shard a frozen target in place, whatever device it is on, and return its head, whole, on `device`.

    The loss asks the target for hidden states and multiplies them by its head itself, so the head stays whole: 2 V H bytes
    in bf16.
    """
    head = LMHead.of(target)
    head = LMHead(
        head.weight_VH.detach().to(device), None if head.bias_V is None else head.bias_V.detach().to(device), head.scale, head.softcap
    )
    target.requires_grad_(False)
    for layer in _layers(target):
        fully_shard(layer)
    fully_shard(target.base_model)
    return head


def _layers(model: PreTrainedModel) -> list[nn.Module]:
    names = set(getattr(model, "_no_split_modules", None) or ())
    layers = [module for module in model.modules() if type(module).__name__ in names]
    if not layers:
        raise ValueError(
            f"launch.engine=fsdp: {type(model).__name__} does not say which of its modules are layers (_no_split_modules); "
            "use launch.engine=ddp"
        )
    return layers


class WholeCopy:
    """Makes whole drafts out of a sharded one. Create it before sharding: that changes the model's class."""

    def __init__(self, draft: PreTrainedModel, own_head: OwnHead | None) -> None:
        self.draft, self.own_head, self.model_class = draft, own_head, type(draft)

    def gather(self, state: dict[str, Any] | None = None) -> PreTrainedModel | None:
        """A copy with all weights and all V rows of the head, in process 0; None in the others. All must call it.

        `state`: the weights, where the engine has gathered them already.
        """
        if state is None:
            state = get_model_state_dict(self.draft, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if dist.get_rank() != 0:
            return None
        with torch.device("meta"):
            # Not from_config, which under DeepSpeed would shard it, and wait for the other processes.
            whole: PreTrainedModel = self.model_class(copy.deepcopy(self.draft.config))
            if self.own_head is not None:
                rows = self.own_head.rows
                whole.set_output_embeddings(nn.Linear(rows.in_features, len(self.own_head.ids_N), bias=rows.bias is not None))
        whole.load_state_dict(state, assign=True)
        if self.own_head is None:
            whole.tie_weights()
        else:
            whole.set_output_embeddings(self.own_head.all_rows(whole.get_output_embeddings()))
        _copy_buffers(self.draft, whole)
        whole.generation_config = self.draft.generation_config
        return whole.to(self.draft.device).eval()


def _copy_buffers(source: nn.Module, whole: nn.Module) -> None:
    """Buffers that are in no state dict, such as rotary frequencies, are still without values."""
    owners = dict(whole.named_modules())
    for name, buffer in source.named_buffers():
        owner, _, last = name.rpartition(".")
        owners[owner].register_buffer(last, buffer.clone(), persistent=last not in owners[owner]._non_persistent_buffers_set)


def save_state(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write weights and optimiser state, each process its part; with one process the whole. All must call it."""
    weights, moments = get_state_dict(model, optimizer)
    with _one_process_is_meant():
        save({"model": weights, "optimizer": moments}, checkpoint_id=folder, no_dist=not dist.is_initialized())


def load_state(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Read what `save_state` wrote, however many processes wrote it and however they held the model."""
    weights, moments = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": weights, "optimizer": moments}
    with _one_process_is_meant():
        load(state, checkpoint_id=folder, no_dist=not dist.is_initialized())
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


@contextmanager
def _one_process_is_meant() -> Iterator[None]:
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
            yield
    except CheckpointException as error:
        # It is a BaseException, which no handler of errors takes, around what failed: a full disk, for one.
        raise next(iter(error.failures.values()))[0] from None
