"""Acceptance rules that change the output's distribution. They are used by name only, and outputs carry lossless=False.

Shape legend: B rows, G proposals (a chain, or the nodes of a tree), T = G + 1, V vocabulary.
"""

from typing import Optional

import torch
from torch import Tensor

from specdec_runtime.config import DecoderConfig
from specdec_runtime.proposal import Proposal
from specdec_runtime.tree import Tree
from specdec_runtime.verify import probs_of


def lossy_accepts(
    config: DecoderConfig,
    proposal: Proposal,
    *,
    probs_BTV: Tensor,
    adjusted_BTV: Tensor,
    is_greedy_B: Tensor,
    accept_uniform_BG: Tensor,
    draft_vocab_ids_N: Optional[Tensor],
) -> Tensor:
    """Verdicts [B, G] of the configured lossy rule; `lenient` is for chains.

    `typical` (Medusa, arXiv 2401.10774): p(d) > min(eta^2, eta * exp(-H(p))). At temperature 0, p is the target's
    distribution at temperature 1, for a one-hot p has no entropy to go by.
    `lenient` (Leviathan et al. 2023, appendix A.5): u * lenience * q(d) < p(d); at temperature 0: p(d) >= lenience * max p.
    """
    tree, num_drafted = proposal.tree, proposal.ids_BG.shape[1]
    assert tree is None or isinstance(tree, Tree)
    before = list(range(num_drafted)) if tree is None else [parent + 1 for parent in tree.parents]
    raw_BGV = adjusted_BTV[:, before].softmax(dim=2)
    p_BGV = torch.where(is_greedy_B[:, None, None], raw_BGV, probs_BTV[:, before])
    p_drafted_BG = p_BGV.gather(2, proposal.ids_BG[:, :, None]).squeeze(2)
    if config.acceptance == "typical":
        entropy_BG = torch.special.entr(p_BGV).sum(dim=2)
        return p_drafted_BG > (config.eta * torch.exp(-entropy_BG)).clamp(max=config.eta**2)
    assert config.acceptance == "lenient" and tree is None
    q_drafted_BG = probs_of(proposal.ids_BG, proposal.probs_BGN, draft_vocab_ids_N)
    sampled_BG = accept_uniform_BG * config.lenience * q_drafted_BG < p_drafted_BG
    greedy_BG = p_drafted_BG >= config.lenience * p_BGV.amax(dim=2)
    return torch.where(is_greedy_B[:, None], greedy_BG, sampled_BG)


def synthetic_accepts(config: DecoderConfig, accept_uniform_BG: Tensor) -> Tensor:
    """Verdicts [B, G] by chance alone, each proposal with probability `synthetic_acceptance`, whatever the models say.

    For timing models with random weights: the number of tokens per round is right, the tokens mean nothing.
    """
    return accept_uniform_BG < config.synthetic_acceptance
