"""Proof that two tokenizers give the same ids the same meaning, which speculation by token id needs."""

from transformers import PreTrainedTokenizerBase

NUM_NAMED = 5
# The pad token is left out: padding is masked, and which token pads changes nothing that is generated.
SPECIAL_ROLES = ("bos_token", "eos_token", "unk_token")


def require_same_tokenizer(target_tokenizer: PreTrainedTokenizerBase, draft_tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ValueError, naming the first differing tokens, unless token-to-id maps and special tokens are equal.

    Sizes prove nothing: two tokenizers of one size may disagree on every id, and padded embeddings of different sizes
    may belong to one tokenizer.
    """
    target_map, draft_map = target_tokenizer.get_vocab(), draft_tokenizer.get_vocab()
    differing = [token for token in {**target_map, **draft_map} if target_map.get(token) != draft_map.get(token)]
    if differing:
        differing.sort(key=lambda token: (min(target_map.get(token, 1 << 62), draft_map.get(token, 1 << 62)), token))
        named = ", ".join(
            f"{token!r} (target {target_map.get(token, 'has none')}, draft {draft_map.get(token, 'has none')})"
            for token in differing[:NUM_NAMED]
        )
        raise ValueError(
            f"the draft's tokenizer is not the target's: {len(differing)} tokens have other ids, the first are "
            f"{named}. Choose a draft of the target's own family"
        )
    _require_same_special_tokens(target_tokenizer, draft_tokenizer)


def _require_same_special_tokens(target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase) -> None:
    differing = [
        f"{role} (target {getattr(target, role)!r}, draft {getattr(draft, role)!r})"
        for role in SPECIAL_ROLES
        if getattr(target, role) != getattr(draft, role)
    ]
    pads = {target.pad_token, draft.pad_token}
    only_one = sorted((set(target.all_special_tokens) ^ set(draft.all_special_tokens)) - pads)
    differing += [f"{token!r} is special in one of them only" for token in only_one[:NUM_NAMED]]
    if differing:
        raise ValueError(
            f"the draft's special tokens are not the target's: {'; '.join(differing)}. Choose a draft of the "
            "target's own family and kind (chat or base), or set its special tokens to the target's"
        )
