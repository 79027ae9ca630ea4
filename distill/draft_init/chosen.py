"""Which of the target's layers make the best draft: asked of short trainings, since untrained drafts say little."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel

from distill.draft_init.layers import draft_from_layers, select_layers

#: (candidate draft, its name) -> held-out acceptance rate after its short budget.
Heal = Callable[[PreTrainedModel, str], float]


@dataclass(frozen=True)
class ChosenLayers:
    """The winner, and the healed acceptance of every candidate by name, e.g. "0-1-29"."""

    keep_layers: list[int]
    acceptance: dict[str, float]


def candidate_layers(
    num_target_layers: int, num_layers: int, candidates: Sequence[Sequence[int]] | None = None
) -> list[list[int]]:
    """The candidates, checked; without any, the patterns of `select_layers` and all-but-one first layers with the last one.

    Raises:
        ValueError: layers that the target has not, or candidates of different depths: the deepest would mostly win by
            acceptance, and cost more at every step.
    """
    if candidates is not None:
        kept = [select_layers(num_target_layers, len(candidate), list(candidate)) for candidate in candidates]
        if len({len(layers) for layers in kept}) > 1:
            raise ValueError(
                f"draft.candidates={kept}: give candidates of one depth, since acceptance does not weigh what a layer costs"
            )
    else:
        kept = [select_layers(num_target_layers, num_layers, pattern=pattern) for pattern in ("first", "even", "ends")]
        kept.append([*range(num_layers - 1), num_target_layers - 1])
    unique: list[list[int]] = []
    for layers in kept:
        if layers not in unique:
            unique.append(layers)
    return unique


def choose_layers(target: PreTrainedModel, candidates: Sequence[Sequence[int]], heal: Heal) -> ChosenLayers:
    """The candidate with the highest acceptance after `heal`; of equals, the one named first."""
    acceptance: dict[str, float] = {}
    for layers in candidates:
        name = "-".join(map(str, layers))
        acceptance[name] = heal(draft_from_layers(target, layers), name)
    best = max(acceptance, key=lambda name: acceptance[name])
    return ChosenLayers([int(index) for index in best.split("-")], acceptance)
