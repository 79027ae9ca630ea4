"""Acceptance as real decoding shows it: the engine decodes prompts, and its own counts are read.

    accepted / judged proposals, over all rounds         (a proposal is judged when all before it in its round stood)
    P(i-th proposal stands | all before it stood)        by place in the round

Each judged proposal stands with probability a_t of its position (`eval.acceptance`), so accepted / judged estimates the
mean of a_t over the judged positions. Those are all positions but the first (from the prefill), the bonus tokens and
the last one before a length limit: with a gamma that is long against tau there is hardly a bonus, and the figure is the
marginal acceptance rate. With a short gamma the bonus positions, which follow accepted ones and are easier, are
missing, and it lies below. `eval.rounds` predicts it for the same gamma, with that effect.

Shapes: P prompts, G = gamma.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedModel

from eval.acceptance import NO_WARPER, Warper
from eval.bootstrap import Interval, bootstrap_ratio
from eval.measured_runtime import fixed_chains
from eval.teacher_forcing import Draft
from specdec_runtime import DecoderConfig, Output, Request, SpeculativeDecoder, Stats
from specdec_runtime.stats import total_stats


@dataclass(frozen=True)
class DecodedAcceptance:
    """One draft's decoding of P prompts at one temperature and gamma; `outputs` in prompt order."""

    draft: str
    temperature: float
    sampler: str
    gamma: int
    outputs: list[Output] = field(repr=False)

    @property
    def stats(self) -> Stats:
        """Sum over prompts."""
        return total_stats(output.stats for output in self.outputs)

    def judged_acceptance(self, *, num_bootstrap: int = 1000, seed: int = 0) -> Interval:
        """Accepted over judged proposals, with its interval over prompts."""
        return bootstrap_ratio(
            self._counts("accepted_per_position").sum(axis=1),
            self._counts("judged_per_position").sum(axis=1),
            num_bootstrap=num_bootstrap,
            seed=seed,
        )

    def conditional(self, *, num_bootstrap: int = 1000, seed: int = 0) -> list[Interval]:
        """P(i-th proposal stands | all before it stood) for the first, second, ... that was judged at all."""
        accepted_PG = self._counts("accepted_per_position")
        judged_PG = self._counts("judged_per_position")
        return [
            bootstrap_ratio(accepted_PG[:, i], judged_PG[:, i], num_bootstrap=num_bootstrap, seed=seed)
            for i in range(self.gamma)
            if judged_PG[:, i].sum() > 0
        ]

    def block_efficiency(self, *, num_bootstrap: int = 1000, seed: int = 0) -> Interval:
        """tau: committed tokens over target forwards, prefills among them."""
        all_stats = [output.stats for output in self.outputs]
        return bootstrap_ratio(
            [stats.num_committed for stats in all_stats],
            [stats.num_rounds + stats.num_prefills for stats in all_stats],
            num_bootstrap=num_bootstrap,
            seed=seed,
        )

    def _counts(self, name: str) -> NDArray[np.float64]:
        """[P, G] of one of the lists that `Stats` keeps."""
        counts_PG = np.zeros((len(self.outputs), self.gamma))
        for i, output in enumerate(self.outputs):
            counts = getattr(output.stats, name)
            counts_PG[i, : len(counts)] = counts
        return counts_PG


def decoded_acceptance(
    target: PreTrainedModel,
    drafts: Mapping[str, Draft],
    prompts: Sequence[Sequence[int]],
    *,
    temperature: float,
    gamma: int,
    sampler: str = "probabilistic",
    warper: Warper = NO_WARPER,
    max_new_tokens: int = 64,
    batch_size: int = 8,
    seed: int = 0,
    runtime: DecoderConfig | None = None,
) -> list[DecodedAcceptance]:
    """Decodes all prompts with each draft, `gamma` proposals per round; prompt i samples with seed + i.

    Raises:
        ValueError: no prompts, or what the engine refuses.
    """
    if not prompts:
        raise ValueError("decoded_acceptance: no prompts were given")
    config = fixed_chains(
        runtime,
        num_speculative_tokens=gamma,
        sampler=sampler,
        max_batch_size=batch_size,
        acceptance="exact",
        # The bound on a batch's proposals would shorten gamma.
        max_draft_tokens=max(gamma * batch_size, 1),
        draft_confidence=0.0,
    )
    requests = [
        Request(
            list(prompt),
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=warper.top_k,
            top_p=warper.top_p,
            min_p=warper.min_p,
            seed=seed + index,
        )
        for index, prompt in enumerate(prompts)
    ]
    result = []
    for name, draft in drafts.items():
        decoder = SpeculativeDecoder(target, draft.model, config, draft_vocab_ids=draft.vocab_ids)
        result.append(DecodedAcceptance(name, temperature, sampler, gamma, decoder.generate(requests)))
    return result
