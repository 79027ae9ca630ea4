"""Attention over the slots' KV cache, as a Transformers attention function that copies no key and no value.

Grouped-query attention is folded into the query length: [B, Hkv*G, L, D] is seen as [B, Hkv, G*L, D], so that each KV
head is read once for all of its query heads and `repeat_kv` is not needed. On a CPU this is 2 to 8 times faster
than the usual path with a mask. There, blocks of few query rows are padded to `MIN_QUERY_ROWS`: smaller matrix products
take another kernel, which rounds differently, one of the reasons why bf16 outputs depend on the width of a forward. One new
position for each of many rows takes two plain matrix products, there the fastest.

Shape legend: B rows, H query heads, K kv heads, G = H / K, L query positions, T cached positions, D head size.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Optional

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

NAME = "draftsmith"
MIN_QUERY_ROWS = 8
MIN_PLAIN_ROWS = 32


def folded_sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Optional[Tensor],
    dropout: float = 0.0,
    scaling: Optional[float] = None,
    sliding_window: Optional[int] = None,
    softcap: Optional[float] = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Same result as eager attention for q [B, H, L, D] and cached k, v [B, K, T, D]; returns [B, L, H, D].

    Args:
        attention_mask: additive [B, 1, L, T], with position i of each row seeing a prefix of the T positions.
        sliding_window: the layer sees the last `sliding_window` positions only; the mask is narrowed here.
        softcap: scores become softcap * tanh(scores / softcap), as in Gemma 2; computed in fp32.
    """
    assert attention_mask is not None, "the runtime always hands over a mask"
    for name in ("position_bias", "s_aux"):
        if kwargs.get(name) is not None:
            raise ValueError(
                f"{type(module).__name__}: attention with {name} is not supported by the runtime"
            )
    num_rows, num_heads, num_positions, head_dim = query.shape
    num_kv_heads, num_cached = key.shape[1], key.shape[2]
    group = num_heads // num_kv_heads
    if sliding_window is not None and sliding_window < num_cached:
        attention_mask = _narrow(attention_mask, sliding_window)
    scaling = head_dim**-0.5 if scaling is None else scaling
    num_folded = group * num_positions
    folded = query.reshape(num_rows, num_kv_heads, num_folded, head_dim)
    is_wide_batch = not query.is_cuda and num_positions == 1 and num_rows >= MIN_PLAIN_ROWS
    if softcap is not None or is_wide_batch:
        mask = attention_mask if num_positions == 1 else attention_mask.repeat(1, 1, group, 1)
        out = _plain_attention(folded, key, value, mask, scaling, softcap)
    else:
        mask = attention_mask.repeat(1, 1, group, 1) if group > 1 else attention_mask
        num_padding = 0 if query.is_cuda else max(0, MIN_QUERY_ROWS - num_folded)
        if num_padding:
            folded, mask = (nn.functional.pad(x, (0, 0, 0, num_padding)) for x in (folded, mask))
        out = nn.functional.scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scaling)
    out = out[:, :, :num_folded].reshape(num_rows, num_heads, num_positions, value.shape[-1])
    return out.transpose(1, 2).contiguous(), None


def _plain_attention(
    folded: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float, softcap: Optional[float]
) -> Tensor:
    """Two matrix products with the softmax in fp32 between them."""
    # Keys first: with a handful of queries on the other side, a CPU does the same product in half the time.
    scores = torch.matmul(key, folded.transpose(2, 3)).transpose(2, 3).float() * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    return torch.matmul((scores + mask).softmax(dim=-1).to(value.dtype), value)


def causal_mask(positions_BL: Tensor, num_cached: int, dtype: torch.dtype) -> Tensor:
    """Additive [B, 1, L, T]: position p sees the cached positions 0..p."""
    cached_T = torch.arange(num_cached, device=positions_BL.device)
    hidden_B1LT = (cached_T > positions_BL[:, :, None])[:, None]
    return torch.zeros(hidden_B1LT.shape, dtype=dtype, device=positions_BL.device).masked_fill_(
        hidden_B1LT, -torch.inf
    )


def _narrow(mask_B1LT: Tensor, window: int) -> Tensor:
    """Hides what lies `window` or more positions before each query; the query's own position is the last seen one."""
    last_B1L1 = (mask_B1LT == 0).sum(dim=-1, keepdim=True) - 1
    cached_T = torch.arange(mask_B1LT.shape[-1], device=mask_B1LT.device)
    return mask_B1LT.masked_fill(cached_T <= last_B1L1 - window, -torch.inf)


@contextmanager
def attention_of_runtime(model: PreTrainedModel) -> Iterator[None]:
    """Switches the model to `folded_sdpa` inside the block only: the user's model is left as it was."""
    config = model.config
    previous = config._attn_implementation
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = previous


# Without an entry in the mask registry, Transformers hands a ready 4D mask through as it is.
AttentionInterface.register(NAME, folded_sdpa)
