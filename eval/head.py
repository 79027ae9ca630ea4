"""Heads and vocabularies: which token ids are scored, by which rows of a model's output head.

Shapes: N positions, D hidden, V token ids, K shortlisted ids.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel


def num_shared_token_ids(target_vocab: Mapping[str, int], draft_vocab: Mapping[str, int]) -> int:
    """How many token ids both tokenizers have, after proving that the two token-to-id maps are equal.

    Equal sizes prove nothing and different paddings forbid nothing, so the maps themselves are compared.

    Raises:
        ValueError: some token has another id, or only one side has it; the first such tokens are named.
    """
    different = sorted(
        (
            token
            for token in target_vocab.keys() | draft_vocab.keys()
            if target_vocab.get(token) != draft_vocab.get(token)
        ),
        key=lambda token: min(target_vocab.get(token, 1 << 60), draft_vocab.get(token, 1 << 60)),
    )
    if different:
        shown = ", ".join(f"{t!r}: {target_vocab.get(t)} / {draft_vocab.get(t)}" for t in different[:5])
        raise ValueError(
            f"target and draft tokenizers differ in {len(different)} tokens (target id / draft id: {shown}); "
            "a draft must share the target's token ids"
        )
    return max(target_vocab.values()) + 1


def resolve_num_token_ids(
    models: Sequence[PreTrainedModel], vocab_ids: Sequence[Tensor | None], num_token_ids: int | None
) -> int:
    """The number of ids that get mass: `num_token_ids`, or the one width that all heads have.

    Heads that are cut to a shortlist (as wide as their `vocab_ids`) say nothing about it.

    Raises:
        ValueError: widths differ and `num_token_ids` is not given, or a head is narrower than it.
    """
    widths: set[int] = set()
    for model, ids in zip(models, vocab_ids, strict=True):
        head = model.get_output_embeddings()
        width = int(
            model.config.get_text_config(decoder=True).vocab_size if head is None else head.weight.shape[0]
        )
        if ids is None or width != len(ids):
            widths.add(width)
    if num_token_ids is None:
        if len(widths) > 1:
            raise ValueError(
                f"logits are {sorted(widths)} wide: compare the tokenizers (num_shared_token_ids) and pass num_token_ids, "
                "so that padding ids get no mass"
            )
        return widths.pop()
    if num_token_ids < 1 or num_token_ids > min(widths):
        raise ValueError(
            f"num_token_ids={num_token_ids}: must be in [1, {min(widths)}], the narrowest logits"
        )
    return num_token_ids


@contextmanager
def evaluating(model: PreTrainedModel) -> Iterator[None]:
    """No gradients, no dropout; the training flag is put back afterwards.

    Not `inference_mode`: what a model caches under it (rotary frequencies) could not be
    trained through later.
    """
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


class Head:
    """A model's head on chosen token ids: hidden [N, D] -> fp32 logits [N, V] or [N, K].

    Holds the head's weights only, so the rest of the model may be freed. `num_token_ids` cuts padding ids
    off: they get no mass on either side. With `vocab_ids` only those columns are computed.

    Raises:
        ValueError: ids outside the head, or a model whose logits are not this head's
            (unknown post-processing).
    """

    def __init__(self, model: PreTrainedModel, num_token_ids: int, vocab_ids: Tensor | None = None) -> None:
        head = model.get_output_embeddings()
        if not isinstance(head, nn.Linear):
            raise ValueError(
                f"{type(model).__name__}: its output head is {type(head).__name__}, not a linear layer"
            )
        width = head.weight.shape[0]
        self.vocab_ids = None if vocab_ids is None else vocab_ids.to(head.weight.device)
        if self.vocab_ids is None:
            if width < num_token_ids:
                raise ValueError(f"the head scores {width} ids, but the vocabulary has {num_token_ids}")
            self._columns: Tensor | slice = slice(0, num_token_ids)
        else:
            if (
                len(self.vocab_ids) == 0
                or int(self.vocab_ids.max()) >= num_token_ids
                or int(self.vocab_ids.min()) < 0
            ):
                raise ValueError(f"vocab_ids must be a non-empty list of ids in [0, {num_token_ids})")
            # A head that is already cut to the shortlist has its columns in the shortlist's order.
            self._columns = slice(None) if width == len(self.vocab_ids) else self.vocab_ids
        self.weight = head.weight.detach()[self._columns]
        self.bias = None if head.bias is None else head.bias.detach()[self._columns]
        config = model.config.get_text_config(decoder=True)
        self._scale = float(getattr(config, "logit_scale", None) or 1.0) / float(
            getattr(config, "logits_scaling", None) or 1.0
        )
        self._softcap = getattr(config, "final_logit_softcapping", None)
        self._check(model)

    def __call__(self, hidden_ND: Tensor) -> Tensor:
        """fp32 logits; the product itself runs in the model's dtype, as it does when the model is served."""
        return self._finish(functional.linear(hidden_ND, self.weight, self.bias).float())

    def top_logits(self, hidden_ND: Tensor, k: int) -> Tensor:
        """The k largest logits [N, k], descending, of which the products are done in fp32 too.

        In bf16 neighbouring logits near 16 lie 0.125 apart, so 16 more candidates than asked for
        are looked at anew.
        """
        ids_NC = self(hidden_ND).topk(min(k + 16, self.weight.shape[0]), dim=-1).indices
        logits_NC = torch.einsum("nd,ncd->nc", hidden_ND.float(), self.weight[ids_NC].float())
        if self.bias is not None:
            logits_NC = logits_NC + self.bias[ids_NC].float()
        return self._finish(logits_NC).topk(k, dim=-1).values

    def _finish(self, logits: Tensor) -> Tensor:
        """What the architecture does to its head's output."""
        if self._scale != 1.0:
            logits = logits * self._scale
        return torch.tanh(logits / self._softcap) * self._softcap if self._softcap else logits

    def _check(self, model: PreTrainedModel) -> None:
        """Some architectures scale or cap their logits: prove on three tokens that nothing was missed."""
        with evaluating(model):
            ids_BT = torch.tensor([[0, 1, 2]], device=model.device) % self.weight.shape[0]
            theirs = model(input_ids=ids_BT, use_cache=False).logits[0].float()[:, self._columns]
            ours = self(cast(Any, model.base_model)(input_ids=ids_BT, use_cache=False)[0][0])
        tolerance = 1e-4 if self.weight.dtype == torch.float32 else 5e-2
        if not torch.allclose(ours, theirs, rtol=tolerance, atol=tolerance * float(theirs.abs().max())):
            raise ValueError(
                f"{type(model).__name__}: its logits are not its head's output; this post-processing is not supported"
            )
