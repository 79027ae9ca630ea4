"""Which drafter a decoder has."""

from typing import Any, Optional

from torch import Tensor
from transformers import PreTrainedModel

from specdec_runtime.config import DecoderConfig
from specdec_runtime.drafter import Drafter
from specdec_runtime.forward import StepOptions
from specdec_runtime.ngram import NgramDrafter
from specdec_runtime.proposal import Proposer
from specdec_runtime.tree_drafter import TreeDrafter


def make_drafter(
    config: DecoderConfig,
    draft_model: Optional[PreTrainedModel],
    draft_vocab_ids: Optional[Tensor],
    *,
    target_vocab_size: int,
) -> Optional[Proposer]:
    """The drafter that `config.drafter` names; None in plain decoding.

    Raises:
        ValueError: a draft model or a shortlist for a drafter that has no model, or a model that cannot be used.
    """
    if config.drafter == "ngram" and (draft_model is not None or draft_vocab_ids is not None):
        raise ValueError(
            "drafter='ngram' proposes without a model: leave draft_model and draft_vocab_ids out, or set drafter='model'"
        )
    if config.num_speculative_tokens == 0:
        return None
    if config.drafter == "ngram":
        return NgramDrafter(min_tokens=config.ngram_min, max_tokens=config.ngram_max)
    if draft_model is None:
        return None
    settings: dict[str, Any] = {
        "target_vocab_size": target_vocab_size,
        "vocab_ids": draft_vocab_ids,
        "sampler": config.sampler,
        "max_spread": config.max_gamma_spread,
        "options": StepOptions.of(config),
    }
    if config.topology is not None:
        return TreeDrafter(draft_model, config.topology, max_draft_tokens=config.max_draft_tokens, **settings)
    return Drafter(draft_model, **settings)
