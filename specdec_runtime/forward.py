"""One model with its slots: forwards that write a block of tokens per row and give logits.

Shape legend: B rows, L positions of the block, V vocabulary, H hidden size.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec_runtime.attention import attention_of_runtime, causal_mask
from specdec_runtime.cache import LENGTH_STEP, SCRATCH, SlotCache, padded_capacity
from specdec_runtime.config import DecoderConfig
from specdec_runtime.graphs import Computed, GraphedSteps
from specdec_runtime.hidden import watching_hidden
from specdec_runtime.layout import BlockLayout
from specdec_runtime.model_facts import context_of, kv_bytes_per_position, require_attention_interface
from specdec_runtime.packed import packed

#: Packed linear layers take no longer for this many tokens than for one, which has a kernel of its own that rounds otherwise.
MIN_STEP_TOKENS = 4


class StepOptions(NamedTuple):
    """How forwards are run. `pads_rows`: each decode step has as many rows as there are slots."""

    compile: bool = False
    cuda_graphs: bool = False
    pads_rows: bool = False
    pack_weights: bool = False

    @classmethod
    def of(cls, config: DecoderConfig) -> "StepOptions":
        """What the engine's settings say."""
        return cls(config.compile, config.cuda_graphs, config.width_invariant, config.pack_weights)


class ModelRunner:
    """Wraps a causal LM (target or draft) with a slot cache.

    Args:
        model: any Transformers causal LM whose attention goes through the attention interface.
        role: "target" or "draft", for messages.
        options: how decode steps are run.

    Raises:
        ValueError: the model's attention or cache cannot be used; names the model and why.
    """

    def __init__(self, model: PreTrainedModel, role: str, options: Optional[StepOptions] = None) -> None:
        require_attention_interface(model, role)
        options = options or StepOptions()
        self.role = role
        # Compiled code calls its own kernels, over weights in their ordinary layout.
        self.model = (
            packed(model.eval(), role) if options.pack_weights and not options.compile else model.eval()
        )
        self.device, self.dtype = model.device, model.dtype
        self._step_model = self._compiled() if options.compile else self.model
        self._graphs = GraphedSteps() if options.cuda_graphs and self.device.type == "cuda" else None
        self._min_step_tokens = 1 if self.model is model else MIN_STEP_TOKENS
        self._pads_rows = options.pads_rows or self._graphs is not None
        config = model.config.get_text_config()
        self.vocab_size = int(model.get_output_embeddings().weight.shape[0])
        self.context = context_of(config)
        self.num_layers = int(config.num_hidden_layers)
        self.kv_bytes_per_position = kv_bytes_per_position(model)
        self.num_input_ids = int(model.get_input_embeddings().weight.shape[0])
        self.clamps_ids = False  # set where ids may come that the model does not know
        self.cache: Optional[SlotCache] = None
        # Last hidden states [B, L, H] at the positions of the last forward's logits, where they are wanted.
        self.keeps_hidden = False
        self.hidden_BLH: Optional[Tensor] = None

    def _compiled(self) -> Callable[..., Any]:
        """Attended lengths and batch sizes change all the time, and each must not be compiled anew (`dynamic`). On a CPU the
        weights are constants to the compiler (`freezing`), which packs them as `packed` does."""
        freezes = self.device.type == "cpu"
        return torch.compile(self.model, dynamic=True, options={"freezing": True} if freezes else None)

    def kv_bytes(self, num_slots: int, capacity: int) -> int:
        """Bytes that `allocate` with these figures takes."""
        return self.kv_bytes_per_position * num_slots * padded_capacity(capacity)

    def allocate(self, num_slots: int, capacity: int) -> None:
        """Makes room for `num_slots` sequences of `capacity` positions; a cache that is large enough is kept."""
        capacity = padded_capacity(capacity)
        if self.cache is None or self.cache.num_slots < num_slots or self.cache.capacity < capacity:
            self.cache = None  # frees the old one before the new one is made
            self.cache = SlotCache(self.num_layers, num_slots, capacity)
            if self._graphs is not None:
                self._graphs.clear()

    def forward(
        self,
        ids_BL: Tensor,
        starts_B: Tensor,
        *,
        num_cached: int,
        first_slot: int = 0,
        num_logits: Optional[int] = None,
        sits_out_B: Optional[Tensor] = None,
    ) -> Optional[Tensor]:
        """Feeds L tokens per row at positions `starts_B + 0..L-1`, overwriting what was cached there.

        Args:
            num_cached: no row attends beyond this many positions (rounded up here).
            num_logits: logits of the last `num_logits` positions only; None all, 0 none (the head is not run).
            sits_out_B: rows that take no part: they write to the scratch positions and their logits mean nothing.

        Returns:
            Logits [B, num_logits, V] in the model's dtype, or None when num_logits is 0.
        """
        logits, self.hidden_BLH = self._compute(
            self.model, ids_BL, starts_B, sits_out_B, self._rounded(num_cached), first_slot, num_logits
        )
        return logits

    def step(
        self,
        ids_BL: Tensor,
        starts_B: Tensor,
        *,
        num_cached: int,
        num_logits: Optional[int] = None,
        sits_out_B: Optional[Tensor] = None,
        layout: Optional[BlockLayout] = None,
    ) -> Tensor:
        """A decode forward over the first slots, as `forward`, by CUDA graph or compiled code where that is on.

        The logits may be overwritten by the next step. Blocks of very few tokens are padded: the positions behind them are
        written by a later step before anything reads them.

        Args:
            layout: of a block that is part of a tree, with its root at `starts_B`; None for a chain.
        """
        assert self.cache is not None
        num_rows, num_positions = ids_BL.shape
        num_rows = self.cache.num_slots if self._pads_rows else num_rows
        num_padding = -(-self._min_step_tokens // num_rows) - num_positions
        if num_padding <= 0:
            return self._step(ids_BL, starts_B, num_cached, num_logits, sits_out_B, layout)
        padded_BL = nn.functional.pad(ids_BL, (0, num_padding))
        logits = self._step(padded_BL, starts_B, num_cached, None, sits_out_B, layout)
        first = 0 if num_logits is None else num_positions - num_logits
        if self.hidden_BLH is not None:
            self.hidden_BLH = self.hidden_BLH[:, first:num_positions]
        return logits[:, first:num_positions]

    def _step(
        self,
        ids_BL: Tensor,
        starts_B: Tensor,
        num_cached: int,
        num_logits: Optional[int],
        sits_out_B: Optional[Tensor],
        layout: Optional[BlockLayout],
    ) -> Tensor:
        assert self.cache is not None
        num_cached, num_rows = self._rounded(num_cached), ids_BL.shape[0]
        if not self._pads_rows:
            logits, self.hidden_BLH = self._compute(
                self._step_model, ids_BL, starts_B, sits_out_B, num_cached, 0, num_logits, layout
            )
            assert logits is not None
            return logits
        num_padding = self.cache.num_slots - num_rows
        if sits_out_B is None:
            sits_out_B = torch.zeros_like(starts_B, dtype=torch.bool)
        ids_BL = nn.functional.pad(ids_BL, (0, 0, 0, num_padding))
        starts_B = nn.functional.pad(starts_B, (0, num_padding))
        sits_out_B = nn.functional.pad(sits_out_B, (0, num_padding), value=True)
        # Trees that are new in each round go in like the ids; a fixed one belongs to the graph.
        varying = () if layout is None or not layout.is_by_row else layout.with_rows(num_padding).tensors

        def compute(ids: Tensor, starts: Tensor, sits_out: Tensor, *tensors: Tensor) -> Computed:
            block = BlockLayout(tensors[0], tensors[1], tensors[2]) if tensors else layout
            return self._compute(self._step_model, ids, starts, sits_out, num_cached, 0, num_logits, block)

        if self._graphs is None:
            logits, hidden = compute(ids_BL, starts_B, sits_out_B, *varying)
        else:
            key = (num_cached, num_logits or 0, 0 if varying else id(layout))
            logits, hidden = self._graphs.run(key, compute, ids_BL, starts_B, sits_out_B, *varying)
        assert logits is not None
        self.hidden_BLH = None if hidden is None else hidden[:num_rows]
        return logits[:num_rows]

    def _rounded(self, num_cached: int) -> int:
        assert self.cache is not None
        return min(-(-num_cached // LENGTH_STEP) * LENGTH_STEP, self.cache.capacity)

    def _compute(
        self,
        model: Callable[..., Any],
        ids_BL: Tensor,
        starts_B: Tensor,
        sits_out_B: Optional[Tensor],
        num_cached: int,
        first_slot: int,
        num_logits: Optional[int],
        layout: Optional[BlockLayout] = None,
    ) -> Computed:
        assert self.cache is not None
        num_positions = ids_BL.shape[1]
        if layout is None:
            positions_BL = places_BL = starts_B[:, None] + torch.arange(num_positions, device=self.device)
            mask = causal_mask(positions_BL, num_cached, self.dtype)
        else:
            layout = layout.padded(num_positions)
            positions_BL, places_BL = (starts_B[:, None] + x for x in (layout.offsets_BL, layout.slots_BL))
            mask = layout.mask(starts_B, num_cached, self.dtype)
        if sits_out_B is not None:
            # What is written there is not read: a block of more tokens may write several to the last one.
            scratch_L = torch.arange(num_positions, device=self.device).clamp(max=SCRATCH - 1)
            scratch_L = scratch_L + self.cache.capacity - SCRATCH
            places_BL = torch.where(sits_out_B[:, None], scratch_L, places_BL)
        self.cache.begin(positions_BL=places_BL, first_slot=first_slot, num_cached=num_cached)
        # Padding behind the last position of a full context is never committed, but must be a legal position.
        position_ids_BL = positions_BL.clamp(max=self.context - 1)
        module = self.model.base_model if num_logits == 0 else model
        extra = {} if num_logits == 0 else {"logits_to_keep": num_logits or 0}
        wants_hidden = self.keeps_hidden and num_logits != 0
        with attention_of_runtime(self.model), watching_hidden(self.model, wanted=wants_hidden) as seen:
            out = module(
                input_ids=ids_BL.clamp(max=self.num_input_ids - 1) if self.clamps_ids else ids_BL,
                attention_mask=mask,
                position_ids=position_ids_BL,
                past_key_values=self.cache,
                use_cache=True,
                **extra,
            )
        hidden = seen[0][:, -(num_logits or 0) :] if seen else None
        return Computed(None if num_logits == 0 else out.logits, hidden)

    def prefill(
        self, token_ids: Sequence[int], start: int, *, slot: int, chunk: int, wants_logits: bool
    ) -> Optional[Tensor]:
        """Feeds a row's tokens from position `start` on in chunks; logits [1, 1, V] of the last one when wanted."""
        logits = None
        for first in range(0, len(token_ids), chunk):
            part = list(token_ids[first : first + chunk])
            is_last = first + chunk >= len(token_ids)
            logits = self.forward(
                torch.tensor([part], device=self.device),
                torch.tensor([start + first], device=self.device),
                num_cached=start + first + len(part),
                first_slot=slot,
                num_logits=1 if wants_logits and is_last else 0,
            )
        return logits
