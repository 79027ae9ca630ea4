"""What speculation should gain, from acceptance and step times; no models in here.

Symbols: gamma = num_speculative_tokens; alpha = acceptance rate; tau = expected tokens committed per target
forward, bonus token included; T(k) = one target forward over k new tokens per row; T_draft = one draft step.

    tau(iid)       = (1 - alpha^(gamma+1)) / (1 - alpha)               (Leviathan et al. 2023, equation 1)
    tau(measured)  = 1 + sum_{i=1..gamma} P(tokens 1..i all accepted)
    speedup        = tau * T(1) / (gamma * T_draft + T(gamma+1) + overhead)

The i.i.d. form over-predicts where acceptance is autocorrelated (greedy decoding), so a measured histogram is
preferred wherever there is one. T(gamma+1) is not T(1), least of all on a CPU, so both are measured.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class StepTimes:
    """Measured milliseconds of one device, dtype, batch and context.

    draft_ms: one draft step, T_draft. draft_first_ms: the first step of a round, which feeds two tokens
    (None: as the others). target_ms: T(1), T(2), ... in order. overhead_ms: per round, outside both models.
    """

    draft_ms: float
    target_ms: tuple[float, ...]
    overhead_ms: float = 0.0
    draft_first_ms: float | None = None

    def __post_init__(self) -> None:
        if not self.target_ms or min(self.target_ms) <= 0 or self.draft_ms < 0 or self.overhead_ms < 0:
            raise ValueError(f"{self}: target_ms needs T(1), T(2), ... > 0, and the other times must be >= 0")

    @property
    def max_gamma(self) -> int:
        """The largest gamma for which T(gamma+1) was measured."""
        return len(self.target_ms) - 1

    @property
    def cost_ratio(self) -> float:
        """c = T_draft / T(1)."""
        return self.draft_ms / self.target_ms[0]

    def mean_draft_ms(self, gamma: int) -> float:
        """Mean of a round's gamma draft steps."""
        first_ms = self.draft_ms if self.draft_first_ms is None else self.draft_first_ms
        return (first_ms + (gamma - 1) * self.draft_ms) / gamma

    def verify_ms(self, gamma: int) -> float:
        """T(gamma+1)."""
        if not 0 <= gamma <= self.max_gamma:
            raise ValueError(
                f"gamma={gamma}: T({gamma + 1}) was not measured, only T(1)..T({len(self.target_ms)})"
            )
        return self.target_ms[gamma]

    def speedup(self, *, tau: float, gamma: int) -> float:
        """`predicted_speedup` of decoding alone at these times, with tau tokens per round of gamma proposals."""
        return predicted_speedup(
            tau=tau,
            gamma=gamma,
            draft_ms=self.mean_draft_ms(gamma),
            target_ms=self.target_ms[0],
            verify_ms=self.verify_ms(gamma),
            overhead_ms=self.overhead_ms,
        )


def expected_tokens_iid(alpha: float, gamma: int) -> float:
    """tau when each token is accepted independently with probability alpha; gamma + 1 at alpha = 1."""
    _check_alpha(alpha)
    _check_gamma(gamma)
    return sum(alpha**i for i in range(gamma + 1))


def expected_tokens_from_positions(cumulative_acceptance: Sequence[float], gamma: int | None = None) -> float:
    """tau from measured rates: 1 + sum of the first gamma entries.

    Args:
        cumulative_acceptance: entry i is the share of rounds in which proposals 1..i+1 were all accepted
            (non-increasing, each in [0, 1]).
        gamma: how many proposals; all measured ones by default. More than were measured is refused.
    """
    rates = list(cumulative_acceptance)
    gamma = len(rates) if gamma is None else gamma
    _check_gamma(gamma)
    if gamma > len(rates):
        raise ValueError(f"gamma={gamma}: acceptance was measured for {len(rates)} positions only")
    if any(not 0 <= rate <= 1 for rate in rates):
        raise ValueError(f"cumulative_acceptance={rates}: rates must lie in [0, 1]")
    if any(later > earlier + 1e-9 for earlier, later in itertools.pairwise(rates)):
        raise ValueError(
            f"cumulative_acceptance={rates}: must not increase (did you pass conditional rates?)"
        )
    return 1.0 + sum(rates[:gamma])


def predicted_speedup(
    *,
    tau: float,
    gamma: int,
    draft_ms: float,
    target_ms: float,
    verify_ms: float,
    overhead_ms: float = 0.0,
    prefill_ms: float = 0.0,
    draft_prefill_ms: float = 0.0,
    num_tokens: float | None = None,
) -> float:
    """Speed over plain decoding: tau * T(1) / round, where round = gamma * T_draft + T(gamma+1) + overhead.

    With `num_tokens` (tokens per response, the first of which comes from the prefill) the whole
    request is counted, (prefill + (n-1) * T(1)) / (prefill + draft prefill + (n-1) / tau * round);
    without it decoding alone.
    """
    _check_gamma(gamma)
    if (
        tau <= 0
        or target_ms <= 0
        or verify_ms <= 0
        or min(draft_ms, overhead_ms, prefill_ms, draft_prefill_ms) < 0
    ):
        raise ValueError(
            f"tau={tau}, target_ms={target_ms}, verify_ms={verify_ms}: must be > 0, other times >= 0"
        )
    round_ms = gamma * draft_ms + verify_ms + overhead_ms
    if num_tokens is None:
        return tau * target_ms / round_ms
    num_decoded = max(num_tokens - 1, 0.0)
    plain_ms = prefill_ms + num_decoded * target_ms
    speculative_ms = prefill_ms + draft_prefill_ms + num_decoded / tau * round_ms
    return plain_ms / speculative_ms if speculative_ms > 0 else 1.0


def speedup_iid(alpha: float, gamma: int, times: StepTimes) -> float:
    """`predicted_speedup` of i.i.d. acceptance alpha with measured step times; 1.0 for gamma 0."""
    if gamma == 0:
        return 1.0
    return times.speedup(tau=expected_tokens_iid(alpha, gamma), gamma=gamma)


def break_even_acceptance(gamma: int, times: StepTimes) -> float | None:
    """Smallest alpha at which gamma proposals are as fast as plain decoding; None where none is."""
    if gamma < 1:
        raise ValueError(f"gamma={gamma}: break-even needs at least one proposal")
    if speedup_iid(1.0, gamma, times) < 1.0:
        return None
    low, high = 0.0, 1.0
    if speedup_iid(low, gamma, times) >= 1.0:
        return 0.0
    # tau grows strictly with alpha, so bisection finds the one crossing.
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if speedup_iid(middle, gamma, times) < 1.0 else (low, middle)
    return high


def best_gamma(alpha: float, times: StepTimes, max_gamma: int | None = None) -> tuple[int, float]:
    """(gamma, speedup) with the best i.i.d. speedup up to max_gamma; (0, 1.0) where none pays."""
    limit = times.max_gamma if max_gamma is None else max_gamma
    candidates = [(gamma, speedup_iid(alpha, gamma, times)) for gamma in range(limit + 1)]
    return max(candidates, key=lambda candidate: (candidate[1], -candidate[0]))


def max_paying_draft_ms(alpha: float, gamma: int, times: StepTimes) -> float:
    """The slowest draft step that breaks even: (tau * T(1) - T(gamma+1) - overhead) / gamma, at least 0.

    0 means that no draft of this acceptance pays at this gamma, however cheap it is.
    """
    if gamma < 1:
        raise ValueError(f"gamma={gamma}: needs at least one proposal")
    budget_ms = (
        expected_tokens_iid(alpha, gamma) * times.target_ms[0] - times.verify_ms(gamma) - times.overhead_ms
    )
    return max(budget_ms / gamma, 0.0)


def _check_alpha(alpha: float) -> None:
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha={alpha}: an acceptance rate lies in [0, 1]")


def _check_gamma(gamma: int) -> None:
    if gamma < 0:
        raise ValueError(f"gamma={gamma}: must be >= 0")
