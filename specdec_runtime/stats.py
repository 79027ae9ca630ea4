"""What the engine counts, defined once.

- proposed: draft tokens that the target judged. Accepted: those of them that it kept; the bonus or correction token is
  never among them. A token behind an EOS, a stop or `max_new_tokens` counts as neither. Of a tree, each depth counts as one
  proposal, however many nodes it has.
- round: one decode forward of the target. The prefill of a prompt is one more forward, and commits the first token.
- block efficiency (tau) = committed / (rounds + prefills): exactly 1 without speculation.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Optional


@dataclass
class Stats:
    """Counts and times of one request, or of a whole engine (a sum of requests).

    `accepted_per_position[i]`: rounds in which the (i+1)-th proposed token was accepted; `proposed_per_position` alike;
    `judged_per_position`: those among the proposed ones before which all others were accepted.
    `num_rounds_by_accepted[a]`: rounds with exactly `a` accepted tokens.
    The milliseconds of a round are shared out equally among the rows of its batch, so that requests sum up to the
    engine: draft and verify are the two models' decode forwards, prefill both models' prompt forwards, overhead the rest.
    `not_speculating`: why no token was proposed for a row, None when it speculates.
    """

    num_proposed: int = 0
    num_accepted: int = 0
    num_committed: int = 0
    num_rounds: int = 0
    num_prefills: int = 0
    num_draft_steps: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    proposed_per_position: list[int] = field(default_factory=list)
    judged_per_position: list[int] = field(default_factory=list)
    num_rounds_by_accepted: list[int] = field(default_factory=list)
    prefill_ms: float = 0.0
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    overhead_ms: float = 0.0
    not_speculating: Optional[str] = None

    @property
    def block_efficiency(self) -> float:
        """Committed tokens per target forward, tau."""
        num_forwards = self.num_rounds + self.num_prefills
        return self.num_committed / num_forwards if num_forwards else 0.0

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted over proposed tokens: depends on gamma (0 when nothing was proposed)."""
        return self.num_accepted / self.num_proposed if self.num_proposed else 0.0

    @property
    def conditional_acceptance(self) -> list[float]:
        """Per position, P(accepted | all earlier ones accepted and this one judged)."""
        pairs = zip(self.accepted_per_position, self.judged_per_position, strict=True)
        return [accepted / judged if judged else 0.0 for accepted, judged in pairs]

    def add_round(self, *, num_proposed: int, num_accepted: int) -> None:
        """Counts one round of one row; requires num_accepted <= num_proposed."""
        assert 0 <= num_accepted <= num_proposed
        self.num_rounds += 1
        self.num_proposed += num_proposed
        self.num_accepted += num_accepted
        _count_up_to(self.proposed_per_position, num_proposed)
        _count_up_to(self.judged_per_position, min(num_proposed, num_accepted + 1), length=num_proposed)
        _count_up_to(self.accepted_per_position, num_accepted, length=num_proposed)
        _extend(self.num_rounds_by_accepted, num_accepted + 1)
        self.num_rounds_by_accepted[num_accepted] += 1

    def add(self, other: "Stats") -> None:
        """Adds another's counts and times to this one (`not_speculating` is a row's own and is left alone)."""
        for name, value in vars(other).items():
            mine = getattr(self, name)
            if isinstance(value, list):
                _extend(mine, len(value))
                for i, count in enumerate(value):
                    mine[i] += count
            elif isinstance(value, (int, float)):
                setattr(self, name, mine + value)


def total_stats(parts: Iterable[Stats]) -> Stats:
    """The sum of several."""
    total = Stats()
    for part in parts:
        total.add(part)
    return total


def _extend(counts: list[int], length: int) -> None:
    counts.extend([0] * (length - len(counts)))


def _count_up_to(counts: list[int], num_positions: int, length: int = 0) -> None:
    _extend(counts, max(num_positions, length))
    for i in range(num_positions):
        counts[i] += 1
