"""The rows of a draft's head: as many as the target has, and none that can win without having been trained.

vLLM's `draft_model` method refuses two vocabulary widths, and families pad their embeddings differently (Qwen2.5: 151936
and 152064 rows for one tokenizer; TRL issue 3028, vLLM issue 7252). A row that must not win becomes the mean of rows that may: for
every hidden state its logit is then the mean of theirs, never above their greatest, and by Jensen's inequality its
probability is at most 1 / (how many they are). On SmolLM2-135M, ids outside a shortlist of 8192 get 0.3% together.

Shapes: V = vocabulary width, N = ids that may win, D = hidden size.
"""

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel


def fit_vocab_size(model: PreTrainedModel, vocab_size: int, *, num_token_ids: int) -> int:
    """Change input embeddings, head and config to `vocab_size` rows in place; return rows added (negative: removed).

    Args:
        num_token_ids: ids 0..N-1 are real tokens; rows at and above N are padding.

    Raises:
        ValueError: the new width would cut off real tokens.
    """
    if vocab_size < num_token_ids:
        raise ValueError(
            f"vocab_size={vocab_size} is below the tokenizer's {num_token_ids} ids: the target and its tokenizer do not match"
        )
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    old_size = int(embeddings.weight.shape[0])
    if old_size == vocab_size:
        return 0
    tied = head is not None and head.weight is embeddings.weight
    embeddings.weight = torch.nn.Parameter(_fit_rows(embeddings.weight, vocab_size, num_token_ids))
    embeddings.num_embeddings = vocab_size
    if head is not None:
        head.weight = (
            embeddings.weight
            if tied
            else torch.nn.Parameter(_fit_rows(head.weight, vocab_size, num_token_ids))
        )
        head.out_features = vocab_size
        if head.bias is not None:
            head.bias = torch.nn.Parameter(_fit_bias(head.bias, vocab_size, num_token_ids))
    model.config.get_text_config().vocab_size = vocab_size
    if hasattr(model, "vocab_size"):
        model.vocab_size = vocab_size
    return vocab_size - old_size


def _fit_rows(weight_VD: torch.Tensor, vocab_size: int, num_token_ids: int) -> torch.Tensor:
    kept_VD = weight_VD.detach()[:vocab_size]
    num_new = vocab_size - kept_VD.shape[0]
    mean_D = weight_VD.detach()[:num_token_ids].float().mean(dim=0).to(weight_VD.dtype)
    return torch.cat([kept_VD, mean_D.expand(num_new, -1)]).clone()


def _fit_bias(bias_V: torch.Tensor, vocab_size: int, num_token_ids: int) -> torch.Tensor:
    # The least real bias, and not the mean: the new logit then stays at or below the mean of the real ones.
    kept_V = bias_V.detach()[:vocab_size]
    return torch.cat(
        [kept_V, bias_V.detach()[:num_token_ids].min().expand(vocab_size - kept_V.shape[0])]
    ).clone()


def confine_head(model: PreTrainedModel, vocab_ids: Sequence[int]) -> None:
    """Keep the head's rows of `vocab_ids` and silence the others, in place; input embeddings stay, so a tied head is untied.

    A head trained over a shortlist (FR-Spec, arXiv 2502.14856) leaves its other rows untrained. Engines that know no
    shortlist run them too, and would propose from them.
    """
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    weight_VD = head.weight.detach().clone()
    outside_V = torch.ones(weight_VD.shape[0], dtype=torch.bool)
    outside_V[list(vocab_ids)] = False
    weight_VD[outside_V] = weight_VD[~outside_V].float().mean(dim=0).to(weight_VD.dtype)
    if head.weight is embeddings.weight:
        model.config.tie_word_embeddings = False
        model.config.get_text_config().tie_word_embeddings = False
    head.weight = torch.nn.Parameter(weight_VD)
    if head.bias is not None:
        bias_V = head.bias.detach().clone()
        bias_V[outside_V] = bias_V[~outside_V].min()
        head.bias = torch.nn.Parameter(bias_V)
