"""Which drafter a decoder has."""

from typing import Any, Optional

from torch import Tensor
from transformers import PreTrainedModel

from specdec_runtime.config import DecoderConfig
from specdec_runtime.drafter import Drafter
from specdec_runtime.dynamic_drafter import DynamicTreeDrafter
from specdec_runtime.forward import ModelRunner, StepOptions
from specdec_runtime.medusa import MedusaDrafter
from specdec_runtime.medusa_heads import MedusaHeads
from specdec_runtime.ngram import NgramDrafter
from specdec_runtime.proposal import Proposer
from specdec_runtime.tree import DynamicTree
from specdec_runtime.tree_drafter import TreeDrafter


def make_drafter(
    config: DecoderConfig,
    draft_model: PreTrainedModel | MedusaHeads | None,
    draft_vocab_ids: Optional[Tensor],
    *,
    target: ModelRunner,
) -> Optional[Proposer]:
    """The drafter that `config.drafter` names; None in plain decoding.

    Raises:
        ValueError: a draft model or a shortlist for a drafter that has no model, or a model that cannot be used.
    """
    if config.drafter == "ngram" and (draft_model is not None or draft_vocab_ids is not None):
        raise ValueError(
            "drafter='ngram' proposes without a model: leave draft_model and draft_vocab_ids out, or set drafter='model'"
        )
    _check_medusa(config, draft_model, draft_vocab_ids)
    if config.num_speculative_tokens == 0:
        return None
    if config.drafter == "ngram":
        return NgramDrafter(min_tokens=config.ngram_min, max_tokens=config.ngram_max)
    if draft_model is None:
        return None
    tree = config.topology
    if not isinstance(draft_model, MedusaHeads) and draft_model.device != target.device:
        raise ValueError(
            f"draft {type(draft_model).__name__} is on {draft_model.device}, the target on {target.device}: move it there with "
            "draft_model.to(target_model.device)"
        )
    if isinstance(draft_model, MedusaHeads):
        return MedusaDrafter(
            draft_model,
            target,
            sampler=config.sampler,
            num_tokens=config.num_speculative_tokens if tree is None else tree.depth,
            tree=tree,
            max_draft_tokens=config.max_draft_tokens,
            packs=config.pack_weights,
        )
    settings: dict[str, Any] = {
        "target_vocab_size": target.vocab_size,
        "vocab_ids": draft_vocab_ids,
        "sampler": config.sampler,
        "max_spread": config.max_gamma_spread,
        "options": StepOptions.of(config),
    }
    if isinstance(tree, DynamicTree):
        return DynamicTreeDrafter(draft_model, tree, max_draft_tokens=config.max_draft_tokens, **settings)
    if tree is not None:
        return TreeDrafter(draft_model, tree, max_draft_tokens=config.max_draft_tokens, **settings)
    return Drafter(draft_model, **settings)


def _check_medusa(
    config: DecoderConfig, draft_model: PreTrainedModel | MedusaHeads | None, draft_vocab_ids: Optional[Tensor]
) -> None:
    are_heads = isinstance(draft_model, MedusaHeads)
    if draft_model is not None and are_heads != (config.drafter == "medusa"):
        raise ValueError(
            f"drafter={config.drafter!r} and {type(draft_model).__name__} do not go together: Medusa heads "
            "(load_medusa_heads) need drafter='medusa', which takes nothing else"
        )
    if are_heads and draft_vocab_ids is not None:
        raise ValueError("draft_vocab_ids: Medusa heads bring their own; leave it out")
