"""What is proposed in a round, and what every way of proposing offers to the engine.

Shape legend: B rows, G proposed positions, N ids that can be proposed.
"""

from collections.abc import Sequence
from typing import NamedTuple, Optional, Protocol

from torch import Tensor

from specdec_runtime.batch import Batch
from specdec_runtime.forward import ModelRunner
from specdec_runtime.scheduler import Row
from specdec_runtime.stopwatch import Stopwatch


class Proposal(NamedTuple):
    """`probs_BGN` is the q that ids were sampled from; None when they were chosen without chance (q is one-hot)."""

    ids_BG: Tensor
    num_proposed_B: Tensor
    probs_BGN: Optional[Tensor]


class Proposer(Protocol):
    """A source of guesses: a draft model (`drafter.Drafter`), or the text so far (`ngram.NgramDrafter`).

    `runner`: its model with its cache, None where there is none. `vocab_ids_N`: the ids of q's columns, None for all.
    """

    @property
    def runner(self) -> Optional[ModelRunner]: ...

    @property
    def vocab_ids_N(self) -> Optional[Tensor]: ...

    def catch_up(self, rows: Sequence[Row], wanted: Sequence[int], *, chunk: int) -> None:
        """Takes in what was committed since it last proposed, for the rows that want proposals."""
        ...

    def propose(
        self,
        batch: Batch,
        wanted: Sequence[int],
        uniform_PBT: Optional[Tensor],
        watch: Stopwatch,
        *,
        confidence: float = 0.0,
    ) -> Optional[Proposal]:
        """Up to `wanted[row]` tokens for each row, its time as phase "draft"; None when no row gets any.

        Args:
            uniform_PBT: noise by purpose, row and position (`noise.uniforms`); None when nothing is sampled.
            confidence: a row stops where what it would propose is less likely to stand than this.
        """
        ...

    def settle(self, row: Row, *, num_accepted: int, num_drafted: int) -> None:
        """A row's proposals were judged; its accepted tokens are about to be committed."""
        ...

    def move(self, source: int, destination: int, row: Row) -> None:
        """The row goes to another slot."""
        ...
