"""Checks, made once before training, that the packed forward and the cut head compute what the model itself does."""

import torch
from transformers import PreTrainedModel

from distill.head import LMHead
from distill.packed_attention import supervised_hidden

NUM_PROBE_TOKENS = 8
TOLERANCE = 1e-3


def require_matching_forward(model: PreTrainedModel) -> None:
    """Raise ValueError if packed rows see each other, or if the head differs from the model's own logits.

    Both would train on wrong numbers without any error: an architecture may ignore `position_ids` when it makes its
    attention mask, or scale its logits in a way that `LMHead` does not know.
    """
    tokens = torch.arange(NUM_PROBE_TOKENS, device=model.device) % model.get_input_embeddings().weight.shape[0]
    alone, other = tokens[None], tokens.flip(0)[None]
    positions = torch.arange(NUM_PROBE_TOKENS, device=model.device)[None]
    was_training = model.training
    model.eval()
    with torch.no_grad():
        expected = model(input_ids=alone, position_ids=positions, use_cache=False).logits[0].float()
        both = {
            "input_ids": torch.cat([other, alone], 1),
            "position_ids": torch.cat([positions, positions], 1),
            "supervised_S": torch.arange(NUM_PROBE_TOKENS, 2 * NUM_PROBE_TOKENS, device=model.device),
        }
        packed = supervised_hidden(model, both)
        hidden = model.base_model(input_ids=alone, position_ids=positions, use_cache=False).last_hidden_state[0]
        logits = LMHead.of(model).logits(hidden)
    model.train(was_training)
    tolerance = TOLERANCE if model.dtype == torch.float32 else 5e-2
    if _distance(logits, expected) > tolerance:
        raise ValueError(
            f"draft: {type(model).__name__} computes its logits in a way that the chunked head does not reproduce; choose "
            "another architecture for the draft"
        )
    if _distance(packed, hidden) > tolerance:
        raise ValueError(
            f"draft: {type(model).__name__} lets packed rows attend to each other "
            f"(attention implementation {model.config._attn_implementation!r}); load it with attn_implementation='sdpa'"
        )


def _distance(value: torch.Tensor, reference: torch.Tensor) -> float:
    return float((value.float() - reference.float()).norm() / reference.float().norm().clamp(min=1e-6))
