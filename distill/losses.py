"""Distillation losses between the target's distribution p and the draft's q, one value per position.

Every loss has two forms. `loss(target_logp_NV, draft_logp_NV)` takes fp32 log-probabilities over the same V ids.
`loss_topk(topk_ids_NK, topk_logp_NK, draft_logp_NV)` takes the K cached log-probabilities of the target: the other
V - K ids form one bucket, the *tail*, whose mass is what is left of 1 on both sides. Merging ids can only shrink an
f-divergence (data processing inequality), so `forward_kl_topk`, `reverse_kl_topk`, `jsd_topk`, `tv_topk` and
`nla_topk` are lower bounds of the full losses, tight when p and q are proportional inside the tail. Training takes the
same buckets from raw logits, once for all of its losses (`distill.objective`).

Ids that q cannot reach (`draft_logp` is -inf: a padded vocabulary; or `topk_ids` is -1: outside the draft's
vocabulary shortlist) keep their target mass. The overlap losses count it as rejected, which it is. The KL losses
would be infinite there: forward KL and cross entropy drop those terms, so a position weighs as much as the target
mass that q can reach.

`temperature` divides the logits of both sides; there is no T^2 factor. Values are in nats.

Legend: N positions, V vocabulary ids, K cached ids, B buckets (K ids and the tail).
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from distill.topk import topk_buckets

# exp of this is the smallest normal fp32: the log of a probability that fp32 cannot tell from zero.
LOG_FLOOR = math.log(torch.finfo(torch.float32).tiny)
# Cached log-probabilities are fp16, so a tail below this is rounding and reverse KL must not punish it as p = 0.
LOG_TAIL_FLOOR = math.log(1e-5)


def _pair(target_logp_NV: Tensor, draft_logp_NV: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Both sides in fp32 (fp64 stays, for oracles), renormalised at `temperature`."""
    if target_logp_NV.shape != draft_logp_NV.shape:
        raise ValueError(
            f"target_logp has shape {tuple(target_logp_NV.shape)}, draft_logp {tuple(draft_logp_NV.shape)}: "
            "cut both to the ids they share"
        )
    dtype = torch.promote_types(torch.float32, torch.promote_types(target_logp_NV.dtype, draft_logp_NV.dtype))
    target, draft = target_logp_NV.to(dtype), draft_logp_NV.to(dtype)
    if temperature != 1.0:
        target, draft = torch.log_softmax(target / temperature, -1), torch.log_softmax(draft / temperature, -1)
    return target, draft


def _expectation(weights_NV: Tensor, values_NV: Tensor, where_NV: Tensor) -> Tensor:
    """sum_v weights * values over `where`, with neither -inf nor NaN reaching a gradient from outside it."""
    return (weights_NV * torch.where(where_NV, values_NV, 0.0)).masked_fill(~where_NV, 0.0).sum(-1)


def forward_kl(target_logp_NV: Tensor, draft_logp_NV: Tensor, *, temperature: float = 1.0) -> Tensor:
    """KL(p || q) = sum_v p_v log(p_v / q_v), shape N (Hinton et al. 2015; DistillSpec, Zhou et al. 2023).

    Over the ids q can reach, whose target mass is R, this is R * KL(p / R || q): finite, and its gradient is the one
    of -sum_{reachable} p_v log q_v.
    """
    target, draft = _pair(target_logp_NV, draft_logp_NV, temperature)
    p = target.exp()
    reachable = (draft != -math.inf) & (target != -math.inf)
    mass_N = p.masked_fill(~reachable, 0.0).sum(-1)
    target_part = _expectation(p, target, reachable) - torch.xlogy(mass_N, mass_N)
    return target_part - _expectation(p, draft, reachable)


def reverse_kl(
    target_logp_NV: Tensor, draft_logp_NV: Tensor, *, temperature: float = 1.0, log_floor: float = LOG_FLOOR
) -> Tensor:
    """KL(q || p) = sum_v q_v log(q_v / p_v), shape N (MiniLLM, Gu et al. 2023).

    Where p_v = 0 the true value is infinite; log p_v is then `log_floor`. The floor is on the target's side, which has
    no gradient, so q is still pushed away from such ids.
    """
    target, draft = _pair(target_logp_NV, draft_logp_NV, temperature)
    log_ratio = torch.where(draft != -math.inf, draft, 0.0) - target.clamp(min=log_floor)
    return _expectation(draft.exp(), log_ratio, draft != -math.inf)


def jsd(target_logp_NV: Tensor, draft_logp_NV: Tensor, *, beta: float = 0.5, temperature: float = 1.0) -> Tensor:
    """Generalised Jensen-Shannon, beta KL(p || m) + (1 - beta) KL(q || m), m = beta p + (1 - beta) q, shape N.

    Agarwal et al. 2023 (GKD). As there, beta = 0 stands for forward KL and beta = 1 for reverse KL, the limits of
    jsd / beta and jsd / (1 - beta). Symmetric and at most log 2 at beta = 0.5.
    """
    if not 0.0 <= beta <= 1.0:
        raise ValueError(f"jsd beta={beta}: must be within [0, 1]")
    if beta == 0.0:
        return forward_kl(target_logp_NV, draft_logp_NV, temperature=temperature)
    if beta == 1.0:
        return reverse_kl(target_logp_NV, draft_logp_NV, temperature=temperature)
    target, draft = _pair(target_logp_NV, draft_logp_NV, temperature)
    in_p, in_q = target != -math.inf, draft != -math.inf
    # LOG_FLOOR in place of -inf keeps logaddexp's gradient finite; it is never used where both sides are zero.
    safe_p, safe_q = target.clamp(min=2 * LOG_FLOOR), torch.where(in_q, draft, 2 * LOG_FLOOR)
    log_m = torch.logaddexp(safe_p + math.log(beta), safe_q + math.log1p(-beta))
    kl_p = _expectation(target.exp(), safe_p - log_m, in_p)
    kl_q = _expectation(draft.exp(), safe_q - log_m, in_q)
    return beta * kl_p + (1.0 - beta) * kl_q


def _log_overlap(target: Tensor, draft: Tensor) -> Tensor:
    """log alpha = log sum_v min(p_v, q_v), in log space so that a tiny overlap neither underflows nor loses its
    gradient; LOG_FLOOR, without gradient, where no id is possible on both sides."""
    minimum = torch.minimum(target, draft)
    disjoint_N = (minimum == -math.inf).all(-1)
    return torch.logsumexp(minimum.masked_fill(disjoint_N[:, None], LOG_FLOOR), -1).masked_fill(disjoint_N, LOG_FLOOR)


def tv(target_logp_NV: Tensor, draft_logp_NV: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Total variation, 1 - alpha = 1 - sum_v min(p_v, q_v), shape N (DistillSpec): the rejection rate itself."""
    target, draft = _pair(target_logp_NV, draft_logp_NV, temperature)
    return 1.0 - torch.minimum(target, draft).exp().sum(-1)


def nla(target_logp_NV: Tensor, draft_logp_NV: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Negative log acceptance, -log alpha, shape N (LK losses). Its gradient is tv's divided by alpha, so it does not
    vanish where the overlap is still small."""
    return -_log_overlap(*_pair(target_logp_NV, draft_logp_NV, temperature))


def lk_hybrid(target_logp_NV: Tensor, draft_logp_NV: Tensor, *, eta: float = 3.0, temperature: float = 1.0) -> Tensor:
    """lam KL(p || q) + (1 - lam) tv, lam = exp(-eta * stopgrad(alpha)), shape N (LK losses): KL while the overlap is
    small, total variation once it is not. The top-k form is a lower bound wherever KL >= tv."""
    target, draft = _pair(target_logp_NV, draft_logp_NV, temperature)
    rejection_N = tv(target, draft)
    lam_N = torch.exp(-eta * (1.0 - rejection_N.detach()))
    return lam_N * forward_kl(target, draft) + (1.0 - lam_N) * rejection_N


def cross_entropy(
    target_logp_NV: Tensor, draft_logp_NV: Tensor, *, token_ids_N: Tensor | None = None, temperature: float = 1.0
) -> Tensor:
    """-log q(token) on the target's own tokens, shape N; without `token_ids_N`, its expectation -sum_v p_v log q_v.

    A token that q cannot reach gives 0: nothing that q does can change it. `temperature` divides the logits.
    """
    target, draft = _pair(target_logp_NV, draft_logp_NV, temperature)
    if token_ids_N is None:
        return -_expectation(target.exp(), draft, draft != -math.inf)
    logq_N = draft.gather(-1, token_ids_N.clamp(min=0)[:, None])[:, 0]
    reachable = (token_ids_N >= 0) & (logq_N != -math.inf)
    return -torch.where(reachable, logq_N, 0.0)


def _on_buckets(
    loss: Callable[..., Tensor], ids_NK: Tensor, logp_NK: Tensor, draft_logp_NV: Tensor, temperature: float,
    **options: float,
) -> Tensor:
    target_NB, draft_NB = topk_buckets(ids_NK, logp_NK, draft_logp_NV, temperature=temperature)
    return loss(target_NB, draft_NB, **options)


def forward_kl_topk(
    topk_ids_NK: Tensor, topk_logp_NK: Tensor, draft_logp_NV: Tensor, *, temperature: float = 1.0
) -> Tensor:
    """`forward_kl` on the K cached ids and the tail: a lower bound, short by p_tail * KL inside the tail."""
    return _on_buckets(forward_kl, topk_ids_NK, topk_logp_NK, draft_logp_NV, temperature)


def reverse_kl_topk(
    topk_ids_NK: Tensor, topk_logp_NK: Tensor, draft_logp_NV: Tensor, *, temperature: float = 1.0
) -> Tensor:
    """`reverse_kl` on the K cached ids and the tail: a lower bound. The cache cannot tell a tail below 1e-5 from 0, so
    its log-probability is taken as at least log 1e-5."""
    return _on_buckets(
        reverse_kl, topk_ids_NK, topk_logp_NK, draft_logp_NV, temperature, log_floor=LOG_TAIL_FLOOR
    )


def jsd_topk(
    topk_ids_NK: Tensor, topk_logp_NK: Tensor, draft_logp_NV: Tensor, *, beta: float = 0.5, temperature: float = 1.0
) -> Tensor:
    """`jsd` on the K cached ids and the tail: a lower bound."""
    return _on_buckets(jsd, topk_ids_NK, topk_logp_NK, draft_logp_NV, temperature, beta=beta)


def tv_topk(topk_ids_NK: Tensor, topk_logp_NK: Tensor, draft_logp_NV: Tensor, *, temperature: float = 1.0) -> Tensor:
    """`tv` on the K cached ids and the tail: a lower bound, within min(p_tail, q_tail) of the full loss."""
    return _on_buckets(tv, topk_ids_NK, topk_logp_NK, draft_logp_NV, temperature)


def nla_topk(topk_ids_NK: Tensor, topk_logp_NK: Tensor, draft_logp_NV: Tensor, *, temperature: float = 1.0) -> Tensor:
    """`nla` on the K cached ids and the tail: a lower bound, since alpha <= sum_topk min(p, q) + min(p_tail, q_tail)."""
    return _on_buckets(nla, topk_ids_NK, topk_logp_NK, draft_logp_NV, temperature)


def lk_hybrid_topk(
    topk_ids_NK: Tensor, topk_logp_NK: Tensor, draft_logp_NV: Tensor, *, eta: float = 3.0, temperature: float = 1.0
) -> Tensor:
    """`lk_hybrid` on the K cached ids and the tail: a lower bound wherever KL >= tv."""
    return _on_buckets(lk_hybrid, topk_ids_NK, topk_logp_NK, draft_logp_NV, temperature, eta=eta)


def cross_entropy_topk(
    topk_ids_NK: Tensor, topk_logp_NK: Tensor, draft_logp_NV: Tensor, *, temperature: float = 1.0
) -> Tensor:
    """`cross_entropy` on the K cached ids and the tail: a lower bound; exact for K = 1, topk_logp = 0 (the tokens)."""
    return _on_buckets(cross_entropy, topk_ids_NK, topk_logp_NK, draft_logp_NV, temperature)
