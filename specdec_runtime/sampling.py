"""The warpers: one code for p and for q, always in fp32.

Shape legend: B rows, L positions of a block, V vocabulary, N ids the draft can propose (N = V, or a shortlist).
"""

from collections.abc import Sequence
from typing import Optional

import torch
from torch import Tensor

from specdec_runtime.layout import BlockLayout
from specdec_runtime.request import Request

_LEAST_TOP_P = 1e-30  # fp32 rounds what is much smaller to 0, which would keep no id
_NUCLEUS_CANDIDATES = 1024  # sorting this many likely ids is much cheaper than sorting a vocabulary


def warp_logits(
    logits_BLV: Tensor,
    *,
    temperature_B: Tensor,
    top_k_B: Optional[Tensor] = None,
    top_p_B: Optional[Tensor] = None,
    min_p_B: Optional[Tensor] = None,
    max_top_k: Optional[int] = None,
    has_greedy: Optional[bool] = None,
) -> Tensor:
    """Temperature, then top_k, top_p, min_p: removed ids get -inf; a row at temperature 0 keeps its argmax only.

    Args:
        logits_BLV: any floating dtype. temperature_B: >= 0. top_k_B: long, 0 keeps all. top_p_B: in (0, 1].
            min_p_B: in [0, 1]. None: no row uses that warper.
        max_top_k, has_greedy: the largest top_k, and whether a temperature is 0, where the caller knows them; read off
            the tensors otherwise, for which a GPU must wait.

    Returns:
        fp32 [B, L, V]; its softmax is the warped distribution. Ties at a threshold are all kept.
    """
    greedy_B11 = (temperature_B == 0)[:, None, None]
    logits_BLV = logits_BLV.float()
    scale_B11 = temperature_B.float()[:, None, None].masked_fill(greedy_B11, 1.0)
    warped_BLV = logits_BLV / scale_B11
    if top_k_B is not None:
        warped_BLV = _keep_top_k(warped_BLV, top_k_B, int(top_k_B.max()) if max_top_k is None else max_top_k)
    if top_p_B is not None:
        warped_BLV = _keep_top_p(warped_BLV, top_p_B)
    if min_p_B is not None:
        floor_BL1 = warped_BLV.amax(dim=2, keepdim=True) + min_p_B.float().log()[:, None, None]
        warped_BLV = warped_BLV.masked_fill(warped_BLV < floor_BL1, -torch.inf)
    if bool(greedy_B11.any()) if has_greedy is None else has_greedy:
        one_hot_BLV = torch.full_like(logits_BLV, -torch.inf)
        one_hot_BLV.scatter_(2, logits_BLV.argmax(dim=2, keepdim=True), 0.0)
        warped_BLV = torch.where(greedy_B11, one_hot_BLV, warped_BLV)
    return warped_BLV


def _keep_top_k(logits_BLV: Tensor, top_k_B: Tensor, max_top_k: int) -> Tensor:
    num_kept = min(max_top_k, logits_BLV.shape[2])
    if num_kept == 0:
        return logits_BLV
    top_BLk = logits_BLV.topk(num_kept, dim=2).values
    last_B = (top_k_B.clamp(max=num_kept) - 1).clamp(min=0)
    kth_BL1 = top_BLk.gather(2, last_B[:, None, None].expand(-1, top_BLk.shape[1], 1))
    return logits_BLV.masked_fill((logits_BLV < kth_BL1) & (top_k_B > 0)[:, None, None], -torch.inf)


def _keep_top_p(logits_BLV: Tensor, top_p_B: Tensor) -> Tensor:
    """Keeps an id when the mass of all strictly more likely ids is below top_p."""
    top_p_B11 = top_p_B.float()[:, None, None]
    probs_BLV = logits_BLV.softmax(dim=2)
    if probs_BLV.is_cuda:  # there a sort is cheap, and a look at its result is not
        sorted_BLk = probs_BLV.sort(dim=2, descending=True).values
    else:
        sorted_BLk = probs_BLV.topk(min(_NUCLEUS_CANDIDATES, probs_BLV.shape[2]), dim=2).values
        is_enough = (sorted_BLk.sum(dim=2, keepdim=True) >= top_p_B11) | (top_p_B11 >= 1)
        if not bool(is_enough.all()):
            sorted_BLk = probs_BLV.sort(dim=2, descending=True).values
    is_kept_BLk = sorted_BLk.cumsum(dim=2) - sorted_BLk < top_p_B11
    least_BL1 = sorted_BLk.masked_fill(~is_kept_BLk, torch.inf).amin(dim=2, keepdim=True)
    return logits_BLV.masked_fill((probs_BLV < least_BL1) & (top_p_B11 < 1), -torch.inf)


class BatchSampling:
    """The sampling parameters of the rows of a batch as tensors, with the ids each row has seen.

    Built anew when the batch changes; `observe` adds the tokens of each round.

    Args:
        requests: one per row. sequences: prompt + output ids of each row. stop_ids: per row, the ids that
        `min_new_tokens` holds back.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        sequences: Sequence[Sequence[int]],
        stop_ids: Sequence[Sequence[int]],
        *,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        self.requests, self.vocab_size, self.device = list(requests), vocab_size, device
        self.all_greedy = all(r.temperature == 0 for r in requests)
        self.temperature_B = torch.tensor([r.temperature for r in requests], device=device)
        top_k = [min(r.top_k or 0, vocab_size) for r in requests]
        self._top_k_B, self._max_top_k = self._column(top_k, 0), max(top_k, default=0)
        self._top_p_B = self._column([max(r.top_p, _LEAST_TOP_P) for r in requests], 1.0)
        self._min_p_B = self._column([r.min_p for r in requests], 0.0)
        self._repetition_B = self._column([r.repetition_penalty for r in requests], 1.0)
        self._presence_B = self._column([r.presence_penalty for r in requests], 0.0)
        self._min_new_B = self._column([r.min_new_tokens for r in requests], 0)
        self._bias_BV = self._dense_bias()
        self._stop_BV = self._marks(stop_ids) if self._min_new_B is not None else None
        self._seen_BV = self._marks(sequences) if self._repetition_B is not None else None
        outputs = [s[len(r.prompt_token_ids) :] for s, r in zip(sequences, requests, strict=True)]
        self._output_BV = self._marks(outputs) if self._presence_B is not None else None

    @property
    def changes_logits(self) -> bool:
        """Whether any row has a bias, a penalty or min_new_tokens, which act at temperature 0 too."""
        return any(
            x is not None for x in (self._bias_BV, self._repetition_B, self._presence_B, self._min_new_B)
        )

    def observe(self, row: int, token_ids: Sequence[int]) -> None:
        """Marks committed tokens of a row as seen."""
        for marks_BV in (self._seen_BV, self._output_BV):
            if marks_BV is not None and len(token_ids):
                marks_BV[row, torch.tensor(token_ids, device=self.device)] = True

    def adjust(
        self,
        logits_BLN: Tensor,
        *,
        num_generated_B: Tensor,
        proposed_BG: Tensor,
        first_offset: int,
        vocab_ids_N: Optional[Tensor] = None,
        layout: Optional[BlockLayout] = None,
    ) -> Tensor:
        """Bias, penalties and min_new_tokens, in fp32.

        Args:
            logits_BLN: position l of the block is `first_offset + l` proposals past the committed tokens.
            num_generated_B: committed output tokens. proposed_BG: the proposals so far.
            vocab_ids_N: ids of the columns, None for the whole vocabulary.
            layout: of positions in a tree, whose nodes are the proposals; `first_offset` plays no part then.
        """
        logits_BLN = logits_BLN.float()
        if not self.changes_logits:
            return logits_BLN

        def columns(x: Tensor) -> Tensor:
            return x if vocab_ids_N is None else x.index_select(-1, vocab_ids_N)

        if layout is None:
            offset_L = torch.arange(first_offset, first_offset + logits_BLN.shape[1], device=self.device)
            proposal_G = torch.arange(proposed_BG.shape[1], device=self.device)
            offset_BL, lies_behind_BLG = offset_L[None], (proposal_G < offset_L[:, None])[None]
        else:
            offset_BL, lies_behind_BLG = layout.offsets_BL, layout.sees_BLT[:, :, 1 : 1 + proposed_BG.shape[1]]
        if self._bias_BV is not None:
            logits_BLN = logits_BLN + columns(self._bias_BV)[:, None]
        if self._repetition_B is not None and self._seen_BV is not None:
            seen = columns(_seen_in_block(self._seen_BV, proposed_BG, lies_behind_BLG))
            penalty = self._repetition_B[:, None, None]
            penalised = torch.where(logits_BLN > 0, logits_BLN / penalty, logits_BLN * penalty)
            logits_BLN = torch.where(seen, penalised, logits_BLN)
        if self._presence_B is not None and self._output_BV is not None:
            seen = columns(_seen_in_block(self._output_BV, proposed_BG, lies_behind_BLG))
            logits_BLN = logits_BLN - self._presence_B[:, None, None] * seen
        if self._min_new_B is not None and self._stop_BV is not None:
            too_early_BL = num_generated_B[:, None] + offset_BL < self._min_new_B[:, None]
            logits_BLN = logits_BLN.masked_fill(
                too_early_BL[:, :, None] & columns(self._stop_BV)[:, None], -torch.inf
            )
        return logits_BLN

    def warp(self, adjusted_BLN: Tensor) -> Tensor:
        """Probabilities after temperature, top_k, top_p and min_p, fp32."""
        return warp_logits(
            adjusted_BLN,
            temperature_B=self.temperature_B,
            top_k_B=self._top_k_B,
            top_p_B=self._top_p_B,
            min_p_B=self._min_p_B,
            max_top_k=self._max_top_k,
            has_greedy=any(r.temperature == 0 for r in self.requests),
        ).softmax(dim=-1)

    def log_confidences(self, adjusted_BLN: Tensor) -> Tensor:
        """Log-probabilities at each row's temperature, at 1 where that is 0, before top_k, top_p and min_p, fp32."""
        temperature_B = self.temperature_B.masked_fill(self.temperature_B == 0, 1.0)
        return (adjusted_BLN / temperature_B[:, None, None]).log_softmax(dim=-1)

    def _column(self, values: Sequence[float], neutral: float) -> Optional[Tensor]:
        if all(value == neutral for value in values):
            return None
        return torch.tensor(values, device=self.device)

    def _marks(self, ids: Sequence[Sequence[int]]) -> Tensor:
        marks_BV = torch.zeros(len(ids), self.vocab_size, dtype=torch.bool, device=self.device)
        for row, row_ids in enumerate(ids):
            marks_BV[row, torch.tensor(list(row_ids), dtype=torch.long, device=self.device)] = True
        return marks_BV

    def _dense_bias(self) -> Optional[Tensor]:
        if not any(r.logit_bias for r in self.requests):
            return None
        bias_BV = torch.zeros(len(self.requests), self.vocab_size, device=self.device)
        for row, request in enumerate(self.requests):
            for token_id, value in (request.logit_bias or {}).items():
                bias_BV[row, token_id] = value
        return bias_BV


def _seen_in_block(seen_BV: Tensor, proposed_BG: Tensor, lies_behind_BLG: Tensor) -> Tensor:
    """[B, L, V]: what position l has behind it, its own proposals included."""
    seen_BLV = seen_BV[:, None].repeat(1, lies_behind_BLG.shape[1], 1)
    for k in range(proposed_BG.shape[1]):
        ids_BL1 = proposed_BG[:, k, None, None].expand(-1, seen_BLV.shape[1], 1)
        seen_BLV.scatter_(2, ids_BL1, seen_BLV.gather(2, ids_BL1) | lies_behind_BLG[:, :, k, None])
    return seen_BLV
