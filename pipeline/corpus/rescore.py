"""The teacher's candidates for text that came without them: forwards of the target over prompt and response.

Shape legend: B rows, L positions, N tokens of a response, H hidden size, V vocabulary, K stored candidates.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice

import numpy as np
import torch
from transformers import PreTrainedModel

from distill.head import LMHead
from pipeline.corpus.backends.base import NON_FINITE, CorpusBackend, FinishedRow, Options
from pipeline.corpus.rows import Row

#: Positions whose logits are held at a time.
_HEAD_POSITIONS = 512
#: Positions of one forward, padding included.
_FORWARD_POSITIONS = 4096


class RescoringBackend:
    """Takes the text of an engine and the candidates of the target in this process."""

    def __init__(self, backend: CorpusBackend, model: PreTrainedModel, *, batch_size: int) -> None:
        self.backend, self.model, self.batch_size = backend, model, batch_size
        self.name = f"{backend.name}+rescore"

    def generate(self, rows: Iterable[Row], options: Options) -> Iterator[FinishedRow]:
        """See `CorpusBackend.generate`."""
        finished = self.backend.generate(rows, replace(options, topk=0))
        while chunk := list(islice(finished, self.batch_size if options.topk else 1)):
            if options.topk:
                rescore(self.model, [row for row in chunk if row.failure is None], options.topk)
            yield from chunk

    def close(self) -> None:
        """Closes the engine."""
        self.backend.close()


@torch.inference_mode()
def rescore(model: PreTrainedModel, rows: Sequence[FinishedRow], topk: int) -> None:
    """Fill in `topk_ids` and `topk_logprobs`: the log-softmax, in fp32, of the raw logits at each response token."""
    ordered = sorted(rows, key=lambda finished: _length(finished))
    while ordered:
        num = max(1, min(len(ordered), _FORWARD_POSITIONS // _length(ordered[-1])))
        group, ordered = ordered[-num:], ordered[:-num]
        _rescore_group(model, group, topk)


def _length(finished: FinishedRow) -> int:
    return len(finished.row.prompt_token_ids) + len(finished.token_ids)


def _rescore_group(model: PreTrainedModel, group: Sequence[FinishedRow], topk: int) -> None:
    """Padded on the right: behind a row's last token, where nothing of it looks."""
    longest = max(_length(finished) for finished in group)
    ids_BL = torch.zeros(len(group), longest, dtype=torch.long)
    mask_BL = torch.zeros(len(group), longest, dtype=torch.long)
    for i, finished in enumerate(group):
        sequence = [*finished.row.prompt_token_ids, *finished.token_ids]
        ids_BL[i, : len(sequence)] = torch.tensor(sequence)
        mask_BL[i, : len(sequence)] = 1
    hidden_BLH = model.base_model(
        input_ids=ids_BL.to(model.device), attention_mask=mask_BL.to(model.device), use_cache=False
    ).last_hidden_state
    head = LMHead.of(model)
    for i, finished in enumerate(group):
        first = len(finished.row.prompt_token_ids) - 1
        hidden_NH = hidden_BLH[i, first : first + len(finished.token_ids)]
        parts = [_top(head.logits(part_NH), topk) for part_NH in hidden_NH.split(_HEAD_POSITIONS)]
        finished.topk_ids = np.concatenate([ids for ids, _ in parts])
        finished.topk_logprobs = np.concatenate([logprobs for _, logprobs in parts])
        if not np.isfinite(finished.topk_logprobs[:, 0]).all():
            finished.failure, finished.topk_ids, finished.topk_logprobs = NON_FINITE, None, None


def _top(logits_NV: torch.Tensor, topk: int) -> tuple[np.ndarray, np.ndarray]:
    values_NK, ids_NK = logits_NV.topk(topk, dim=-1)
    logprobs_NK = values_NK - logits_NV.logsumexp(dim=-1, keepdim=True)
    return ids_NK.int().cpu().numpy(), logprobs_NK.half().cpu().numpy()
