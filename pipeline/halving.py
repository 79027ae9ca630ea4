"""Successive halving (Jamieson and Talwalkar 2016): short trials for all, longer ones for the better half, until one is left."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar


class Scored(Protocol):
    """What a trial came to; the higher the score, the better."""

    @property
    def score(self) -> float: ...


Result = TypeVar("Result", bound=Scored)


@dataclass(frozen=True)
class Rung(Generic[Result]):
    """One round: its budget, and the results of those that finished, best first."""

    budget: float
    results: dict[str, Result]


def successive_halving(
    names: Sequence[str],
    evaluate: Callable[[str, float], Result | None],
    *,
    first_budget: float,
    keep_fraction: float = 0.5,
    on_rung: Callable[[list[Rung[Result]]], None] = lambda rungs: None,
) -> list[Rung[Result]]:
    """The rounds; the first of the last one's results is the winner. The budget doubles from round to round.

    Args:
        evaluate: the result of a candidate at a budget, or None when it failed, which drops it.
        keep_fraction: share of a round's finished candidates that go on, rounded up, at least one fewer than before.
        on_rung: called with all rounds so far after each.

    Raises:
        ValueError: no candidate, a share out of range, or a round in which every candidate failed.
    """
    if not names or not 0 < keep_fraction < 1 or first_budget <= 0:
        raise ValueError(
            f"{len(names)} candidates, keep_fraction={keep_fraction}, first budget {first_budget}: need one or more, "
            "a share between 0 and 1, and a budget above 0"
        )
    left, budget, rungs = list(names), first_budget, list[Rung[Result]]()
    while True:
        found = {name: result for name in left if (result := evaluate(name, budget)) is not None}
        if not found:
            raise ValueError(f"all {len(left)} candidates failed at a budget of {budget:g}; see the messages above")
        ranked = sorted(found, key=lambda name: -found[name].score)
        rungs.append(Rung(budget, {name: found[name] for name in ranked}))
        on_rung(rungs)
        if len(ranked) == 1:
            return rungs
        left = ranked[: min(math.ceil(keep_fraction * len(ranked)), len(ranked) - 1)]
        if len(left) == 1:
            return rungs
        budget *= 2
