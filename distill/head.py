"""The draft's LM head on supervised positions only, in chunks, so that memory does not grow with vocabulary x length.

Legend: S supervised positions, H hidden size, V rows of the head (all ids, or a shortlist), C positions of one chunk.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

#: Rows of the head's gradient that are added at a time: a whole second one would be a visible share of the peak.
GRAD_BLOCK_ROWS = 8192
# (logits_CV fp32, first position, end position) -> loss_C
ChunkLoss = Callable[[Tensor, int, int], Tensor]


@dataclass
class LMHead:
    """A causal LM's output projection, cut to `vocab_ids` when given, with the scaling that its forward applies."""

    weight_VH: Tensor
    bias_V: Tensor | None
    scale: float
    softcap: float | None

    @classmethod
    def of(cls, model: PreTrainedModel, vocab_ids: Sequence[int] | None = None) -> "LMHead":
        """The head as it is now: rows of a trimmed head are copies that carry gradients back to the full one."""
        layer = model.get_output_embeddings()
        if layer is None:
            raise ValueError(f"{type(model).__name__} has no output embeddings: distillation needs a causal LM")
        weight, bias = layer.weight, getattr(layer, "bias", None)
        if vocab_ids is not None:
            rows = torch.as_tensor(vocab_ids, dtype=torch.long, device=weight.device)
            weight = weight.index_select(0, rows)
            bias = None if bias is None else bias.index_select(0, rows)
        config = model.config.get_text_config()
        return cls(weight, bias, _logit_scale(config), getattr(config, "final_logit_softcapping", None))

    def project(self, hidden_CH: Tensor, compute_dtype: torch.dtype) -> Tensor:
        """hidden @ weight^T + bias in `compute_dtype`, returned as fp32 (C, V), before scaling and soft cap."""
        bias = None if self.bias_V is None else self.bias_V.to(compute_dtype)
        weight = self.weight_VH.to(compute_dtype)
        return torch.nn.functional.linear(hidden_CH.to(compute_dtype), weight, bias).float()

    def finish(self, raw_CV: Tensor) -> Tensor:
        """Scaling and soft cap, as the model's own forward applies them."""
        logits_CV = raw_CV if self.scale == 1.0 else raw_CV * self.scale
        return logits_CV if not self.softcap else torch.tanh(logits_CV / self.softcap) * self.softcap

    def logits(self, hidden_CH: Tensor, compute_dtype: torch.dtype | None = None) -> Tensor:
        """fp32 logits (C, V) of the model's own forward, computed in `compute_dtype` (None: the weights')."""
        return self.finish(self.project(hidden_CH, compute_dtype or self.weight_VH.dtype))

    def to(self, dtype: torch.dtype) -> "LMHead":
        """A detached copy in `dtype`: a frozen head is cast once, not at every step."""
        bias = None if self.bias_V is None else self.bias_V.detach().to(dtype)
        return LMHead(self.weight_VH.detach().to(dtype), bias, self.scale, self.softcap)


def _logit_scale(config: object) -> float:
    """Granite divides the logits by `logits_scaling`; Cohere and Falcon-H1 multiply them."""
    for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"):
        if getattr(config, name, None) is not None:
            return float(getattr(config, name))
    scaling = getattr(config, "logits_scaling", None)
    if scaling is None:
        return 1.0
    return float(scaling) if getattr(config, "model_type", "") == "hyperclovax" else 1.0 / float(scaling)


def chunked_head_loss(
    hidden_SH: Tensor, head: LMHead, loss_of: ChunkLoss, *, chunk_tokens: int, compute_dtype: torch.dtype
) -> Tensor:
    """Sum over the S positions of `loss_of(logits)`, a scalar.

    Only one chunk's logits (C, V) exist at a time. Each chunk's gradient is taken right after its loss, in the forward
    pass, so that nothing of width V is kept or computed again (the scheme of fused linear losses such as Liger's).
    """
    total: Tensor = _ChunkedHeadLoss.apply(  # type: ignore[no-untyped-call]
        hidden_SH, head.weight_VH, head.bias_V, head, loss_of, chunk_tokens, compute_dtype
    )
    return total


class _ChunkedHeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx, hidden_SH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, head: LMHead, loss_of: ChunkLoss,
        chunk_tokens: int, compute_dtype: torch.dtype,
    ) -> Tensor:
        wants_weight, wants_bias = ctx.needs_input_grad[1:3]
        weight = weight_VH.to(compute_dtype)
        cast = LMHead(weight, bias_V, head.scale, head.softcap)
        grad_hidden = torch.empty_like(hidden_SH)
        grad_weight = torch.zeros_like(weight_VH, dtype=torch.float32) if wants_weight else None
        grad_bias = torch.zeros_like(bias_V, dtype=torch.float32) if bias_V is not None and wants_bias else None
        total = hidden_SH.new_zeros((), dtype=torch.float32)
        with torch.autocast(hidden_SH.device.type, enabled=False):
            for start in range(0, hidden_SH.shape[0], chunk_tokens):
                end = min(start + chunk_tokens, hidden_SH.shape[0])
                hidden_CH = hidden_SH[start:end].to(compute_dtype)
                with torch.enable_grad():
                    raw_CV = cast.project(hidden_CH, compute_dtype).detach().requires_grad_()
                    loss = loss_of(cast.finish(raw_CV), start, end).sum()
                    (grad_CV,) = torch.autograd.grad(loss, raw_CV)
                total += loss.detach()
                low_CV = grad_CV.to(compute_dtype)
                grad_hidden[start:end] = low_CV @ weight
                if grad_weight is not None:
                    for rows in range(0, grad_weight.shape[0], GRAD_BLOCK_ROWS):
                        block = slice(rows, rows + GRAD_BLOCK_ROWS)
                        grad_weight[block].add_(low_CV[:, block].T @ hidden_CH)
                if grad_bias is not None:
                    grad_bias += grad_CV.sum(0)
        if wants_weight and grad_weight is None:  # no position at all, and other processes wait for this gradient
            grad_weight = torch.zeros_like(weight_VH, dtype=torch.float32)
        ctx.grads = [grad_hidden, grad_weight, grad_bias]
        return total

    @staticmethod
    def backward(ctx, grad_total: Tensor):  # type: ignore[no-untyped-def]
        # Scaled where they lie, for another V x H would be a visible share of the peak; so there is only one backward pass.
        grads, ctx.grads = ctx.grads, None
        assert grads is not None, "the gradient of a chunked head loss was taken twice"
        grads = [None if grad is None else grad.mul_(grad_total) for grad in grads]
        return *grads, None, None, None, None
