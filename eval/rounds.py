"""The rounds of real decoding, worked out from teacher-forced text: tau for every gamma without decoding anything.

On text that the target wrote, c_t (`eval.acceptance`) is the probability that token t would have been an accepted
proposal, independently of the others given the text. So the rounds over a response are a Markov chain over the
positions where they start, and the expected number of rounds, of judged and of accepted proposals follow exactly:
no i.i.d. assumption, and the autocorrelation of acceptance is in it. Where the text was written under another
distribution (`rows_matched` false, or a warper), a_t stands in for c_t and the figures are approximate.

Shapes: P prompts, T longest response, G = gamma.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from eval.acceptance_table import AcceptanceTable
from eval.bootstrap import Interval, bootstrap_ratio

Array = NDArray[np.float64]


@dataclass(frozen=True)
class ExpectedRounds:
    """Expected counts of each prompt's decoding at one gamma, named as in `specdec_runtime.Stats`.

    num_tokens and num_rounds [P]; judged and accepted [P, G]: rounds in which the (i+1)-th proposal was judged (all
    before it stood), and in which it stood. The first token comes from the prefill, which is one more forward.
    `prompt_ids` [P]: which of them are answers to one prompt, None where each has its own.
    """

    gamma: int
    num_tokens: Array
    num_rounds: Array
    judged: Array
    accepted: Array
    prompt_ids: Sequence[str] | None = None

    def block_efficiency(self, *, num_bootstrap: int = 1000, seed: int = 0) -> Interval:
        """tau: committed tokens over target forwards, the prefill among them."""
        return bootstrap_ratio(
            self.num_tokens, 1 + self.num_rounds, num_bootstrap=num_bootstrap, seed=seed, prompt_ids=self.prompt_ids
        )

    def judged_acceptance(self, *, num_bootstrap: int = 1000, seed: int = 0) -> Interval:
        """Accepted over judged proposals, what real decoding shows of the acceptance rate."""
        return bootstrap_ratio(
            self.accepted.sum(axis=1), self.judged.sum(axis=1), num_bootstrap=num_bootstrap, seed=seed, prompt_ids=self.prompt_ids
        )

    @property
    def conditional(self) -> list[float]:
        """P(i-th proposal stands | all before it stood), for i = 1..gamma."""
        judged_G, accepted_G = self.judged.sum(axis=0), self.accepted.sum(axis=0)
        return [float(a / j) if j > 0 else 0.0 for a, j in zip(accepted_G, judged_G, strict=True)]

    @property
    def cumulative(self) -> list[float]:
        """Share of rounds in which proposals 1..i all stood, for i = 1..gamma."""
        num_rounds = self.num_rounds.sum()
        return [float(a / num_rounds) if num_rounds > 0 else 0.0 for a in self.accepted.sum(axis=0)]


def expected_rounds(table: AcceptanceTable, gamma: int) -> ExpectedRounds:
    """The rounds of decoding the table's responses with `gamma` proposals per round."""
    follows_p = table.given_token and table.rows_matched and table.warper == "none"
    values = table.given_token if follows_p else table.values
    was_cut = table.was_cut or [True] * len(values)
    return replace(rounds_of(values, gamma, was_cut=was_cut), prompt_ids=table.prompt_ids)


def rounds_of(
    stands: Sequence[NDArray[np.float32]], gamma: int, *, was_cut: Sequence[bool]
) -> ExpectedRounds:
    """As `expected_rounds`, from each response's probabilities that a token stands when it is proposed.

    Args:
        was_cut: by the limit on new tokens, before which no proposal is made for the last token; a response that
            ended by itself has its last token proposed like any other.

    Raises:
        ValueError: gamma < 1.
    """
    if gamma < 1:
        raise ValueError(f"gamma={gamma}: rounds need at least one proposal")
    lengths_P = np.array([len(values) for values in stands])
    num_prompts, longest = len(stands), int(lengths_P.max())
    c_PT = np.zeros((num_prompts, longest + gamma + 1))
    for i, values in enumerate(stands):
        c_PT[i, : len(values)] = values
    # Behind `last_P` nothing is proposed.
    last_P = lengths_P - np.array([1 if cut else 0 for cut in was_cut])
    starts_PT = np.zeros((num_prompts, longest + gamma + 2))
    starts_PT[:, 1] = lengths_P > 1
    judged_PG, accepted_PG = np.zeros((num_prompts, gamma)), np.zeros((num_prompts, gamma))
    for start in range(1, longest):
        reach_P = starts_PT[:, start].copy()
        for i in range(gamma):
            position = start + i
            is_proposed_P = position < last_P
            stands_P = reach_P * c_PT[:, position] * is_proposed_P
            judged_PG[:, i] += reach_P * is_proposed_P
            accepted_PG[:, i] += stands_P
            # What fell is corrected at this position; what was not proposed gets the bonus here.
            starts_PT[:, position + 1] += reach_P - stands_P
            reach_P = stands_P
        starts_PT[:, start + gamma + 1] += reach_P
        starts_PT[:, start + 1 :] *= np.arange(start + 1, starts_PT.shape[1]) < lengths_P[:, None]
    return ExpectedRounds(
        gamma=gamma,
        num_tokens=lengths_P.astype(np.float64),
        num_rounds=starts_PT[:, 1:].sum(axis=1),
        judged=judged_PG,
        accepted=accepted_PG,
    )
