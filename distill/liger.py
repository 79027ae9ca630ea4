"""Optional Triton kernels of liger-kernel (Hsu et al. 2024) on CUDA: head projection, loss and gradient in one pass.

They cover a single divergence (forward KL, reverse KL or JSD) against the live target over the whole vocabulary. What they
do not cover is refused rather than quietly computed the slow way. `distill.head.chunked_head_loss` is their oracle.

Legend: S supervised positions, H hidden size, V ids.
"""

from collections.abc import Callable, Mapping
from importlib.util import find_spec

import torch
from torch import Tensor

from distill.head import LMHead
from distill.objective import Objective

WAY_OUT = "set train.liger=false"
#: Position on the generalised JSD's axis, as liger has it.
BETAS = {"forward_kl": 0.0, "reverse_kl": 1.0}


def require_liger() -> None:
    """Raise ValueError where the kernels cannot run."""
    if find_spec("liger_kernel") is None:
        raise ValueError(
            f"train.liger=true needs the package liger-kernel: pip install -e '.[liger]', or {WAY_OUT}"
        )
    if not torch.cuda.is_available():
        raise ValueError(f"train.liger=true needs a CUDA device, and torch sees none: {WAY_OUT}")


def require_fusable(
    objective: Objective, head: LMHead, target_head: LMHead | None, *, has_shortlist: bool, selects_tokens: bool
) -> None:
    """Raise ValueError for a training whose loss the kernels do not compute, naming what stands in the way."""
    check_settings(
        objective.weights, is_live=target_head is not None, has_shortlist=has_shortlist, selects_tokens=selects_tokens
    )
    assert target_head is not None
    if any(part.bias_V is not None or part.scale != 1.0 or part.softcap for part in (head, target_head)):
        reason = "a head with bias, logit scale or soft cap"
    elif head.weight_VH.shape[0] != target_head.weight_VH.shape[0]:
        reason = f"heads of {head.weight_VH.shape[0]} and {target_head.weight_VH.shape[0]} ids"
    else:
        return
    raise _not_with(reason)


def check_settings(
    weights: Mapping[str, float], *, is_live: bool, has_shortlist: bool, selects_tokens: bool
) -> None:
    """Raise ValueError for what is known to stand in the way before there is a model. `weights`: of the losses above 0."""
    if not is_live:
        raise _not_with("loss.teacher=cached: the kernels compare with the live target (loss.teacher=online)")
    if len(weights) != 1 or not set(weights) <= {*BETAS, "jsd"}:
        raise _not_with(f"loss.weights={dict(weights)}: they know one of forward_kl, reverse_kl and jsd")
    if has_shortlist:
        raise _not_with("draft.vocab_shortlist: they take the whole vocabulary")
    if selects_tokens:
        raise _not_with("train.token_selection: they weigh every position alike")


def _not_with(reason: str) -> ValueError:
    return ValueError(f"train.liger=true does not go with {reason}; change it, or {WAY_OUT}")


def fused_summed_loss(
    hidden_SH: Tensor, head: LMHead, target_SH: Tensor, target_head: LMHead, objective: Objective, compute_dtype: torch.dtype
) -> Tensor:
    """Sum over the S positions of the objective's one divergence, a scalar; gradients reach `hidden_SH` and the head."""
    from liger_kernel.ops.fused_linear_jsd import LigerFusedLinearJSDFunction

    ((name, weight),) = objective.weights.items()
    beta = BETAS.get(name, objective.options["jsd"]["beta"])
    apply: Callable[..., Tensor] = LigerFusedLinearJSDFunction.apply
    with torch.autocast(hidden_SH.device.type, enabled=False):
        mean = apply(
            hidden_SH.to(compute_dtype), head.weight_VH.to(compute_dtype), target_SH.to(target_head.weight_VH.dtype),
            target_head.weight_VH, None, beta, -100, objective.temperature, torch.float32,
        )
    return mean * (weight * len(hidden_SH))
