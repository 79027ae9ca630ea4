"""From the target's logits to committed blocks on the host: warp p, apply the rule, one packed transfer.

Shape legend: B rows, G proposed positions, T = G + 1, V vocabulary.
"""

from dataclasses import dataclass
from typing import Optional

import torch
from torch import Tensor

from specdec_runtime.batch import Batch
from specdec_runtime.config import DecoderConfig
from specdec_runtime.lossy import lossy_accepts, synthetic_accepts
from specdec_runtime.noise import ACCEPT, NEXT, NUM_PURPOSES
from specdec_runtime.proposal import Proposal
from specdec_runtime.request import Request
from specdec_runtime.scheduler import TokenLogprob
from specdec_runtime.tree_judge import judge_tree
from specdec_runtime.verify import Verdict, verify_chain


@dataclass
class Judgement:
    """What a round gave, on the host.

    `blocks[row]`: the accepted tokens and the one that follows them. `num_drafted`: the most tokens that a row could have had
    accepted. With a tree, still on the device: `path_BD`, the accepted nodes (see `TreeVerdict`), and `draft_path_BD`, the same nodes
    by their places in the draft's cache.
    """

    blocks: list[list[int]]
    num_proposed: list[int]
    num_accepted: list[int]
    num_drafted: int
    path_BD: Optional[Tensor] = None
    draft_path_BD: Optional[Tensor] = None
    token_logprobs: Optional[list[list[float]]] = None
    top_ids: Optional[list[list[list[int]]]] = None
    top_logprobs: Optional[list[list[list[float]]]] = None

    def logprobs_of(self, row: int, request: Request) -> list[TokenLogprob]:
        """Entries for the tokens of the row's block; empty when the request wants none."""
        if request.logprobs is None:
            return []
        assert self.token_logprobs is not None
        assert self.top_ids is not None
        assert self.top_logprobs is not None
        k = request.logprobs
        return [
            TokenLogprob(self.token_logprobs[row][i], self.top_ids[row][i][:k], self.top_logprobs[row][i][:k])
            for i in range(len(self.blocks[row]))
        ]


class Judge:
    """Applies the verification rule to a round's logits."""

    def __init__(self, config: DecoderConfig, draft_vocab_ids_N: Optional[Tensor]) -> None:
        self.config, self.draft_vocab_ids_N = config, draft_vocab_ids_N

    def __call__(
        self,
        logits_BTV: Tensor,
        proposal: Optional[Proposal],
        batch: Batch,
        uniform_PBT: Optional[Tensor],
    ) -> Judgement:
        """logits_BTV: raw, any dtype; position i follows the i-th proposal. proposal: None in plain decoding."""
        num_rows, path_BD = logits_BTV.shape[0], None
        if proposal is None:
            none_B0 = torch.zeros(num_rows, 0, dtype=torch.long, device=logits_BTV.device)
            proposal = Proposal(none_B0, none_B0.new_zeros(num_rows), None)
        line_BG = proposal.ids_BG  # of which the accepted ones are the first
        if proposal.tree is None:
            verdict = self._verdict(logits_BTV, proposal, batch, uniform_PBT)
        else:
            num_accepted_B, path_BD, next_ids_B = judge_tree(
                self.config, logits_BTV, proposal, batch, uniform_PBT, self.draft_vocab_ids_N
            )
            verdict = Verdict(num_accepted_B, next_ids_B)
            line_BG = line_BG.gather(1, path_BD.clamp(min=0))
        block_BT = torch.nn.functional.pad(line_BG, (0, 1))
        block_BT.scatter_(1, verdict.num_accepted_B[:, None], verdict.next_ids_B[:, None])
        counts_B2 = torch.stack([proposal.num_proposed_B, verdict.num_accepted_B], dim=1)
        packed = torch.cat([counts_B2, block_BT], dim=1).tolist()
        judgement = Judgement(
            blocks=[row[2 : 3 + row[1]] for row in packed],
            num_proposed=[row[0] for row in packed],
            num_accepted=[row[1] for row in packed],
            num_drafted=proposal.num_drafted,
            path_BD=path_BD,
            draft_path_BD=_as_drafted(path_BD, proposal.draft_nodes_BN),
        )
        wanted = [r.logprobs for r in batch.sampling.requests if r.logprobs is not None]
        if wanted:
            if path_BD is not None:
                at_BT = torch.nn.functional.pad(path_BD.clamp(min=0) + 1, (1, 0))
                logits_BTV = logits_BTV[torch.arange(num_rows, device=at_BT.device)[:, None], at_BT]
            _add_logprobs(judgement, logits_BTV, block_BT, max(wanted))
        return judgement

    def _verdict(
        self,
        logits_BTV: Tensor,
        proposal: Proposal,
        batch: Batch,
        uniform_PBT: Optional[Tensor],
    ) -> Verdict:
        sampling = batch.sampling
        draft = {"draft_ids_BG": proposal.ids_BG, "num_proposed_B": proposal.num_proposed_B}
        lossy_accept_BG = None
        if self.config.acceptance == "synthetic":
            uniform_PBT = batch.uniforms(logits_BTV.shape[1]) if uniform_PBT is None else uniform_PBT
            lossy_accept_BG = synthetic_accepts(
                self.config, uniform_PBT[ACCEPT, :, : proposal.ids_BG.shape[1]]
            )
        is_by_argmax = sampling.all_greedy and self.config.acceptance in ("exact", "synthetic")
        if is_by_argmax and not sampling.changes_logits:
            return verify_chain(
                **draft, target_ids_BT=logits_BTV.argmax(dim=2), lossy_accept_BG=lossy_accept_BG
            )
        adjusted_BTV = sampling.adjust(
            logits_BTV, num_generated_B=batch.num_generated(), proposed_BG=proposal.ids_BG, first_offset=0
        )
        if is_by_argmax:
            return verify_chain(
                **draft, target_ids_BT=adjusted_BTV.argmax(dim=2), lossy_accept_BG=lossy_accept_BG
            )
        probs_BTV = sampling.warp(adjusted_BTV)
        if uniform_PBT is None:
            # Temperature 0: nothing is left to chance.
            uniform_PBT = probs_BTV.new_zeros(NUM_PURPOSES, *probs_BTV.shape[:2])
        accept_uniform_BG = uniform_PBT[ACCEPT, :, : proposal.ids_BG.shape[1]]
        if self.config.acceptance in ("typical", "lenient"):
            lossy_accept_BG = lossy_accepts(
                self.config,
                proposal,
                probs_BTV=probs_BTV,
                adjusted_BTV=adjusted_BTV,
                is_greedy_B=sampling.temperature_B == 0,
                accept_uniform_BG=accept_uniform_BG,
                draft_vocab_ids_N=self.draft_vocab_ids_N,
            )
        return verify_chain(
            **draft,
            target_probs_BTV=probs_BTV,
            draft_probs_BGN=proposal.probs_BGN,
            draft_vocab_ids_N=self.draft_vocab_ids_N,
            accept_uniform_BG=accept_uniform_BG,
            next_uniform_BT=uniform_PBT[NEXT, :, : probs_BTV.shape[1]],
            lossy_accept_BG=lossy_accept_BG,
        )


def _as_drafted(path_BD: Optional[Tensor], draft_nodes_BN: Optional[Tensor]) -> Optional[Tensor]:
    if path_BD is None or draft_nodes_BN is None:
        return path_BD
    return draft_nodes_BN.gather(1, path_BD.clamp(min=0)).masked_fill(path_BD < 0, -1)


def _add_logprobs(judgement: Judgement, logits_BTV: Tensor, block_BT: Tensor, k: int) -> None:
    logits_BTV = logits_BTV.float()
    logsumexp_BT1 = logits_BTV.logsumexp(dim=2, keepdim=True)
    chosen_BT1 = logits_BTV.gather(2, block_BT[:, :, None]) - logsumexp_BT1
    judgement.token_logprobs = chosen_BT1.squeeze(2).tolist()
    top = logits_BTV.topk(min(k, logits_BTV.shape[2]), dim=2)
    judgement.top_ids, judgement.top_logprobs = top.indices.tolist(), (top.values - logsumexp_BT1).tolist()
