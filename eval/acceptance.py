"""Acceptance: how much of the target's distribution the draft covers. This page is the definition.

For a position t of a response y that the target wrote to a prompt x, with p = p(. | x, y_<t) of the target
and q = q(. | x, y_<t) of the draft, both in fp32 and after the same warpers:

    temperature 0                     a_t = 1 if argmax p == argmax q else 0      (for both samplers)
    T > 0, sampler `probabilistic`    a_t = sum_v min(p_v, q_v) = 1 - TV(p, q)    (Leviathan et al. 2023)
    T > 0, sampler `greedy`           a_t = p(argmax q)                           (one-hot q, vLLM's default)

    acceptance_rate = sum of a_t over all measured positions / number of measured positions

    and, given the token y_t that is there: c_t = min(1, q(y_t) / p(y_t)), or 1 if y_t == argmax q else 0

* Measured positions are every generated response token, the first and the final EOS included, none after EOS.
* It is marginal: the prefix is always the target's own text, so a_t is not conditioned on earlier
  proposals having been accepted in a round. (What a server prints, accepted / proposed tokens, depends on
  gamma and is another figure.)
* The bonus token is not counted: it is drawn from p and nothing was proposed for it.
* Rows are those that were sampled at the temperature being measured, if there are any; otherwise all rows.
* A draft with a shortlist (`vocab_ids`) has q renormalised over those ids and zero elsewhere.
* Padding ids (logits wider than the tokenizer) have no mass on either side.

On text that p wrote, c_t is the probability that y_t would have been an accepted proposal, had it been proposed
for; it has a_t's mean, and `eval.rounds` follows it from token to token to count the rounds of real decoding.

So acceptance lies in [0, 1], and is exactly 1 when draft and target are the same model.

Shapes: N positions of a chunk, V token ids, K ids that the draft scores (K = V without a
shortlist), P prompts.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec_runtime.sampling import warp_logits


@dataclass(frozen=True)
class Warper:
    """The runtime's own top-k, top-p and min-p: fp32 logits [N, V], already divided by the temperature -> the same
    with -inf where an id is cut.

    Raises:
        ValueError: a value out of range; names it.
    """

    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k={self.top_k}: must be >= 1, or null to keep all ids")
        if not 0 < self.top_p <= 1 or not 0 <= self.min_p <= 1:
            raise ValueError(f"top_p={self.top_p} must lie in (0, 1] and min_p={self.min_p} in [0, 1]")

    @property
    def name(self) -> str:
        """`none`, or what it does, as in `top_k=20 top_p=0.9`."""
        parts = [f"top_k={self.top_k}"] if self.top_k else []
        parts += [f"top_p={self.top_p:g}"] if self.top_p < 1 else []
        parts += [f"min_p={self.min_p:g}"] if self.min_p > 0 else []
        return " ".join(parts) or "none"

    def __call__(self, logits_NV: Tensor) -> Tensor:
        if self.name == "none":
            return logits_NV

        def column(value: float) -> Tensor:
            return torch.tensor([value], device=logits_NV.device)

        return warp_logits(
            logits_NV[None],
            temperature_B=column(1.0),
            top_k_B=column(self.top_k) if self.top_k else None,
            top_p_B=column(self.top_p) if self.top_p < 1 else None,
            min_p_B=column(self.min_p) if self.min_p > 0 else None,
        )[0]


NO_WARPER = Warper()


def distribution(logits_NV: Tensor, temperature: float, warper: Warper = NO_WARPER) -> Tensor:
    """p [N, V] in fp32 at a temperature > 0, or q [N, K] on the draft's columns: the same for both sides."""
    assert temperature > 0
    return torch.softmax(warper(logits_NV.float() / temperature), dim=-1)


def greedy_agreement(
    target_logits_NV: Tensor, draft_logits_NK: Tensor, vocab_ids: Tensor | None = None
) -> Tensor:
    """Temperature 0: 1.0 where both models' most likely ids agree, shape [N]."""
    draft_ids_N = draft_logits_NK.argmax(dim=-1)
    draft_ids_N = draft_ids_N if vocab_ids is None else vocab_ids[draft_ids_N]
    return (target_logits_NV.argmax(dim=-1) == draft_ids_N).float()


def overlap(p_NK: Tensor, q_NK: Tensor, *, is_shortlist: bool = False) -> Tensor:
    """sum_v min(p_v, q_v), shape [N], as 1 - TV, which is exactly 1.0 for equal rows in floating point too.

    With `is_shortlist` the columns are the draft's ids only, and the mass that p has elsewhere
    is distance as well.
    """
    distance_N = (p_NK - q_NK).abs().sum(dim=-1)
    if is_shortlist:
        distance_N = distance_N + (1 - p_NK.sum(dim=-1)).clamp_min(0)
    return (1 - 0.5 * distance_N).clamp(0, 1)


def greedy_sampler_acceptance(
    p_NV: Tensor, draft_logits_NK: Tensor, vocab_ids: Tensor | None = None
) -> Tensor:
    """p(argmax q), shape [N]: the chance that the target's sample is the draft's one proposal."""
    draft_ids_N = draft_logits_NK.argmax(dim=-1)
    draft_ids_N = draft_ids_N if vocab_ids is None else vocab_ids[draft_ids_N]
    return p_NV.gather(-1, draft_ids_N[:, None])[:, 0].clamp(0, 1)


def acceptance_given_token(p_token_N: Tensor, q_token_N: Tensor) -> Tensor:
    """P(the committed token was an accepted proposal | which token it is) = min(1, q / p), shape [N].

    A token y is committed with probability p(y), and as an accepted proposal with min(p(y), q(y)); its mean over
    y ~ p is the overlap. Where p is 0 (text that p cannot have written) it is 0.
    """
    return torch.where(p_token_N > 0, q_token_N / p_token_N.clamp_min(1e-38), p_token_N).clamp(0, 1)


def entropy(logits_NV: Tensor) -> Tensor:
    """The distribution's entropy in nats at temperature 1, shape [N], in fp32."""
    log_p_NV = torch.log_softmax(logits_NV.float(), dim=-1)
    return -(log_p_NV.exp() * log_p_NV).sum(dim=-1).clamp_max(0)
