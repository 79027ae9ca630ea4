"""Can a draft pay on this device? The verdict from measured step times, before any acceptance is known."""

from collections.abc import Sequence
from typing import TypedDict

from rich.table import Table

from eval.theory import StepTimes, best_gamma, break_even_acceptance, max_paying_draft_ms, speedup_iid

#: Above this, an acceptance is not to be hoped for from a draft that is cheaper than its target.
HIGHEST_PLAUSIBLE_ACCEPTANCE = 0.95
#: For `best_gamma`, while nothing is measured: what a small distilled draft commonly reaches.
ASSUMED_ACCEPTANCE = 0.6
ACCEPTANCES = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)


class AcceptanceOutlook(TypedDict):
    """What one acceptance would bring: the best gamma (0: do not speculate) and its predicted speedup."""

    acceptance_rate: float
    best_gamma: int
    speedup: float


class Verdict(TypedDict):
    """The core of `verdict.json`. gammas are JSON keys, so they are strings; null: slower even if all is accepted."""

    pays: bool
    best_gamma: int
    assumed_acceptance: float
    paying_gammas: list[int]
    break_even_acceptance: dict[str, float | None]
    cost_ratio: float
    T_target_ms: dict[str, float]
    T_draft_ms: float
    T_draft_first_ms: float
    overhead_ms: float
    outlook: list[AcceptanceOutlook]
    speedup_by_acceptance: dict[str, dict[str, float]]
    largest_paying_draft_ms: float
    largest_paying_num_layers: int | None
    meaning: str


def make_verdict(times: StepTimes, *, times_by_layers: Sequence[tuple[int, float]] = ()) -> Verdict:
    """Break-even, best gamma and outlook from T(1..gamma+1) and T_draft.

    Args:
        times: measured step times; gammas 1..times.max_gamma are judged.
        times_by_layers: (number of layers, draft step in ms) of two or more drafts of one shape, for the largest
            number of layers that pays at the assumed acceptance; without it that figure is null.
    """
    gammas = range(1, times.max_gamma + 1)
    break_even = {gamma: break_even_acceptance(gamma, times) for gamma in gammas}
    paying = [gamma for gamma in gammas if _is_paying(break_even[gamma])]
    chosen, _ = best_gamma(ASSUMED_ACCEPTANCE, times)
    if chosen == 0:
        chosen = min(paying, key=lambda gamma: break_even[gamma] or 0.0) if paying else 0
    largest_ms = max(max_paying_draft_ms(ASSUMED_ACCEPTANCE, gamma, times) for gamma in gammas)
    return {
        "pays": bool(paying),
        "best_gamma": chosen,
        "assumed_acceptance": ASSUMED_ACCEPTANCE,
        "paying_gammas": paying,
        "break_even_acceptance": {str(gamma): value for gamma, value in break_even.items()},
        "cost_ratio": times.cost_ratio,
        "T_target_ms": {str(width): ms for width, ms in enumerate(times.target_ms, start=1)},
        "T_draft_ms": times.draft_ms,
        "T_draft_first_ms": times.mean_draft_ms(1),
        "overhead_ms": times.overhead_ms,
        "outlook": [_outlook(alpha, times) for alpha in ACCEPTANCES],
        "speedup_by_acceptance": {
            f"{alpha:g}": {str(gamma): speedup_iid(alpha, gamma, times) for gamma in gammas}
            for alpha in ACCEPTANCES
        },
        "largest_paying_draft_ms": largest_ms,
        "largest_paying_num_layers": _largest_num_layers(times_by_layers, largest_ms),
        "meaning": _meaning(paying, break_even),
    }


def _is_paying(break_even: float | None) -> bool:
    return break_even is not None and break_even < HIGHEST_PLAUSIBLE_ACCEPTANCE


def _outlook(alpha: float, times: StepTimes) -> AcceptanceOutlook:
    gamma, speedup = best_gamma(alpha, times)
    return {"acceptance_rate": alpha, "best_gamma": gamma, "speedup": speedup}


def _largest_num_layers(times_by_layers: Sequence[tuple[int, float]], largest_ms: float) -> int | None:
    """A straight line through the two extreme drafts: fixed cost (embedding, head, dispatch) plus a cost per layer."""
    if len(times_by_layers) < 2:
        return None
    (layers_low, ms_low), (layers_high, ms_high) = min(times_by_layers), max(times_by_layers)
    ms_per_layer = (ms_high - ms_low) / (layers_high - layers_low)
    if ms_per_layer <= 0:
        return None
    return max(int((largest_ms - (ms_low - layers_low * ms_per_layer)) / ms_per_layer), 0)


def _meaning(paying: list[int], break_even: dict[int, float | None]) -> str:
    """The verdict as a sentence: what was judged, and what was not."""
    if not paying:
        return (
            f"does not pay: no gamma breaks even at an acceptance below {HIGHEST_PLAUSIBLE_ACCEPTANCE:g} on this device; "
            "take fewer layers, a trimmed head (draft.vocab_shortlist), or another device"
        )
    easiest = min(paying, key=lambda gamma: break_even[gamma] or 0.0)
    refused = "" if len(paying) == len(break_even) else f"; only at gamma {', '.join(map(str, paying))}"
    return (
        f"can pay{refused}: from an acceptance of {break_even[easiest] or 0.0:.2f} on, at gamma {easiest}. The acceptance itself is "
        f"not known before training: this says only that some acceptance below {HIGHEST_PLAUSIBLE_ACCEPTANCE:g} is enough"
    )


def _largest(verdict: Verdict) -> str:
    """The largest draft that pays, as a sentence."""
    layers = verdict["largest_paying_num_layers"]
    size = "" if layers is None else f", {layers} of the target's layers"
    return (
        f"The largest draft that pays, at an acceptance of {verdict['assumed_acceptance']:g}: "
        f"a step of {verdict['largest_paying_draft_ms']:.1f} ms{size}"
    )


def verdict_table(verdict: Verdict) -> Table:
    """Predicted speedup by acceptance (rows) and gamma (columns), the best of each row in bold."""
    gammas = list(verdict["break_even_acceptance"])
    table = Table(
        title=f"predicted speedup: draft step {verdict['T_draft_ms']:.2f} ms, target step {verdict['T_target_ms']['1']:.2f} ms, "
        f"cost ratio {verdict['cost_ratio']:.3f}",
        caption=f"{verdict['meaning']}. {_largest(verdict)}",
    )
    table.add_column("acceptance_rate")
    for gamma in gammas:
        table.add_column(f"gamma {gamma}", justify="right")
    for outlook in verdict["outlook"]:
        row = verdict["speedup_by_acceptance"][f"{outlook['acceptance_rate']:g}"]
        table.add_row(
            f"{outlook['acceptance_rate']:g}",
            *(
                f"[bold]{row[gamma]:.2f}[/bold]"
                if int(gamma) == outlook["best_gamma"]
                else f"{row[gamma]:.2f}"
                for gamma in gammas
            ),
        )
    table.add_section()
    table.add_row(
        "break-even",
        *(
            "never" if value is None else f"{value:.2f}"
            for value in verdict["break_even_acceptance"].values()
        ),
    )
    return table
