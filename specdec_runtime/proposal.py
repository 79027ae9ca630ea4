"""What is proposed in a round, and what every way of proposing offers to the engine.

Shape legend: B rows, G proposed positions, N ids that can be proposed.
"""

from collections.abc import Sequence
from typing import NamedTuple, Optional, Protocol

from torch import Tensor

from specdec_runtime.batch import Batch
from specdec_runtime.forward import ModelRunner
from specdec_runtime.layout import RowTrees
from specdec_runtime.noise import NUM_PURPOSES
from specdec_runtime.scheduler import Row
from specdec_runtime.stopwatch import Stopwatch
from specdec_runtime.tree import Tree


class Proposal(NamedTuple):
    """A chain of up to `num_proposed_B` tokens per row, or a tree of which so many depths count.

    ids_BG: the chain, or the nodes of the tree. probs_BGN: the q that they were sampled from, at each position of the chain
    or at `tree.inner`; None when they were chosen without chance (q is one-hot). `draft_nodes_BN`: where the draft keeps a node
    in another place than the target, see `Grown`.
    """

    ids_BG: Tensor
    num_proposed_B: Tensor
    probs_BGN: Optional[Tensor]
    tree: Tree | RowTrees | None = None
    draft_nodes_BN: Optional[Tensor] = None

    @property
    def num_drafted(self) -> int:
        """Tokens that a row can get accepted at most."""
        return self.ids_BG.shape[1] if self.tree is None else self.tree.depth


class Proposer(Protocol):
    """A source of guesses: a draft model (`drafter.Drafter`), the text so far (`ngram.NgramDrafter`), or heads on the target's
    hidden state (`medusa.MedusaDrafter`).

    `runner`: its model with its cache, None where there is none. `vocab_ids_N`: the ids of q's columns, None for all.
    `wants_hidden`: whether `row.hidden_H`, the target's last hidden state, has to be kept for it.
    """

    vocab_ids_N: Optional[Tensor]
    wants_hidden: bool

    @property
    def runner(self) -> Optional[ModelRunner]: ...

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


def node_noise(uniform_PBT: Tensor, purpose: int, tree: Tree) -> Tensor:
    """The nodes' uniform numbers [B, N]: the i-th node of a depth takes lane i, so that a chain takes those of a chain."""
    lanes = [position - tree.positions_at(depth)[0] for position, depth in enumerate(tree.depths)]
    index = [purpose + NUM_PURPOSES * lane for lane in lanes[1:]]
    return uniform_PBT[index, :, [depth - 1 for depth in tree.depths[1:]]].T
