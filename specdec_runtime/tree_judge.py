"""The target's logits over a tree, judged: warp p at every position, apply the rule for trees.

Shape legend: B rows, N nodes, T = N + 1 positions, V vocabulary.
"""

from collections.abc import Callable
from typing import Optional

from torch import Tensor

from specdec_runtime.batch import Batch
from specdec_runtime.config import DecoderConfig
from specdec_runtime.layout import RowTrees, block_layout
from specdec_runtime.lossy import lossy_accepts
from specdec_runtime.noise import ACCEPT, NEXT, NUM_PURPOSES
from specdec_runtime.proposal import Proposal, node_noise
from specdec_runtime.tree import Tree
from specdec_runtime.verify_tree import (
    TreeVerdict,
    verify_tree,
    verify_tree_by_argmax,
    verify_tree_by_draws,
    verify_tree_by_verdicts,
)


class _Lazy:
    """A function of the logits at the positions that are looked at: a path is far fewer of them than a tree."""

    def __init__(self, logits_BTV: Tensor, function: Callable[[Tensor], Tensor]) -> None:
        self.logits_BTV, self.function = logits_BTV, function

    def __getitem__(self, index: tuple[Tensor, Tensor]) -> Tensor:
        return self.function(self.logits_BTV[index])


def judge_tree(
    config: DecoderConfig,
    logits_BTV: Tensor,
    proposal: Proposal,
    batch: Batch,
    uniform_PBT: Optional[Tensor],
    draft_vocab_ids_N: Optional[Tensor],
) -> TreeVerdict:
    """logits_BTV: raw, any dtype; position i + 1 follows node i."""
    tree, sampling = proposal.tree, batch.sampling
    assert tree is not None
    is_exact = config.acceptance == "exact"
    if sampling.changes_logits or not is_exact:
        logits_BTV = sampling.adjust(
            logits_BTV,
            num_generated_B=batch.num_generated(),
            proposed_BG=proposal.ids_BG,
            first_offset=0,
            layout=block_layout(tree, logits_BTV.device),
        )
    draft = {"draft_ids_BN": proposal.ids_BG, "max_depth_B": proposal.num_proposed_B}
    if not is_exact:
        return _judge_lossy(config, logits_BTV, proposal, batch, uniform_PBT)
    if sampling.all_greedy:
        return verify_tree_by_argmax(tree, **draft, target_ids_BT=_Lazy(logits_BTV, lambda x_BV: x_BV.argmax(dim=1)))
    assert uniform_PBT is not None
    probs_BTV = _Lazy(logits_BTV, lambda x_BV: sampling.warp(x_BV[:, None].float()).squeeze(1))
    if isinstance(tree, RowTrees):
        return verify_tree_by_draws(tree, **draft, target_probs_BTV=probs_BTV, next_uniform_BE=uniform_PBT[NEXT])
    return verify_tree(
        tree,
        **draft,
        target_probs_BTV=probs_BTV,
        draft_probs_BIC=proposal.probs_BGN,
        draft_vocab_ids_C=draft_vocab_ids_N,
        accept_uniform_BN=node_noise(uniform_PBT, ACCEPT, tree),
        next_uniform_BE=uniform_PBT[NEXT, :, : tree.depth + 1],
    )


def _judge_lossy(
    config: DecoderConfig,
    adjusted_BTV: Tensor,
    proposal: Proposal,
    batch: Batch,
    uniform_PBT: Optional[Tensor],
) -> TreeVerdict:
    tree, sampling = proposal.tree, batch.sampling
    assert isinstance(tree, Tree)
    probs_BTV = sampling.warp(adjusted_BTV)
    if uniform_PBT is None:  # temperature 0: nothing is left to chance
        uniform_PBT = probs_BTV.new_zeros(NUM_PURPOSES, *probs_BTV.shape[:2])
    accept_BN = lossy_accepts(
        config,
        proposal,
        probs_BTV=probs_BTV,
        adjusted_BTV=adjusted_BTV,
        is_greedy_B=sampling.temperature_B == 0,
        accept_uniform_BG=uniform_PBT[ACCEPT, :, : tree.depth],
        draft_vocab_ids_N=None,
    )
    return verify_tree_by_verdicts(
        tree,
        accept_BN=accept_BN,
        max_depth_B=proposal.num_proposed_B,
        target_probs_BTV=probs_BTV,
        next_uniform_BE=uniform_PBT[NEXT, :, : tree.depth + 1],
    )
