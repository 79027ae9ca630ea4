"""Feeds whole prompts (and what a draft has missed) into the slots: in chunks, short ones several rows at a time."""

from collections.abc import Sequence
from typing import NamedTuple, Optional

import torch
from torch import Tensor

from specdec_runtime.cache import SCRATCH
from specdec_runtime.forward import ModelRunner
from specdec_runtime.request import flat_ids


class Feed(NamedTuple):
    """Tokens to put into a slot from position `start` on."""

    slot: int
    token_ids: Sequence[int]
    start: int


class SharedPrefix:
    """Tokens with which many prompts begin, such as a system prompt: run once, and copied into each such prompt's slot."""

    def __init__(self, runner: ModelRunner, token_ids: Sequence[int], *, chunk: int) -> None:
        assert runner.cache is not None
        self.runner, self.token_ids = runner, list(token_ids)
        runner.cache.clean(0)
        runner.prefill(self.token_ids, 0, slot=0, chunk=chunk, wants_logits=False)
        self._layers = runner.cache.copy_of(0, len(self.token_ids))

    def rest(self, slot: int, prompt: Sequence[int]) -> Feed:
        """What is left to be fed of a prompt; all of it where it begins otherwise."""
        num = len(self.token_ids)
        if len(prompt) <= num or list(prompt[:num]) != self.token_ids:
            return Feed(slot, prompt, 0)
        assert self.runner.cache is not None
        self.runner.cache.put(slot, self._layers)
        return Feed(slot, prompt[num:], num)


def share_prefix(runner: ModelRunner, token_ids: Sequence[int], *, chunk: int) -> Optional[SharedPrefix]:
    """None where there is nothing that a prompt could begin with: no tokens, more than a slot holds, or ids that do not exist."""
    ids = flat_ids("shared_prefix", token_ids)
    if not ids or runner.cache is None or len(ids) > runner.cache.capacity - SCRATCH:
        return None
    exist = min(ids) >= 0 and max(ids) < runner.num_input_ids
    return SharedPrefix(runner, ids, chunk=chunk) if exist else None


def feed_all(runner: ModelRunner, feeds: Sequence[Feed], *, chunk: int) -> None:
    """Writes the feeds' keys and values; neighbouring slots share a forward of up to `chunk` tokens, padding included."""
    for group in _groups(feeds, chunk, runner):
        if len(group) == 1:
            runner.prefill(
                group[0].token_ids, group[0].start, slot=group[0].slot, chunk=chunk, wants_logits=False
            )
        else:
            _feed_padded(runner, group)


def prompt_logits(
    runner: ModelRunner,
    prompts: Sequence[Sequence[int]],
    *,
    first_slot: int,
    chunk: int,
    one_by_one: bool = False,
    prefix: Optional[SharedPrefix] = None,
) -> Tensor:
    """Feeds the prompts into consecutive slots; returns the logits [B, 1, V] after the last token of each.

    Afterwards `runner.hidden_BLH` has the hidden states of these positions, if the runner keeps any.

    Args:
        one_by_one: no two prompts share a forward, whose shape would decide how each one's numbers are rounded.
        prefix: what prompts that begin with it are not fed again.
    """
    logits, hidden = [], []
    assert runner.cache is not None
    for slot in range(first_slot, first_slot + len(prompts)):
        runner.cache.clean(slot)
    feeds = [
        Feed(first_slot + i, prompt, 0) if prefix is None else prefix.rest(first_slot + i, prompt)
        for i, prompt in enumerate(prompts)
    ]
    for group in [[feed] for feed in feeds] if one_by_one else _groups(feeds, chunk, runner):
        if len(group) == 1:
            last = runner.prefill(
                group[0].token_ids, group[0].start, slot=group[0].slot, chunk=chunk, wants_logits=True
            )
        else:
            # All but the last tokens without the head, which is then run on one position per row only.
            _feed_padded(runner, [Feed(f.slot, f.token_ids[:-1], f.start) for f in group])
            starts = [f.start + len(f.token_ids) - 1 for f in group]
            last = runner.forward(
                torch.tensor([[f.token_ids[-1]] for f in group], device=runner.device),
                torch.tensor(starts, device=runner.device),
                num_cached=max(starts) + 1,
                first_slot=group[0].slot,
            )
        assert last is not None
        logits.append(last)
        if runner.hidden_BLH is not None:
            hidden.append(runner.hidden_BLH)
    runner.hidden_BLH = torch.cat(hidden) if hidden else None
    return torch.cat(logits)


def _feed_padded(runner: ModelRunner, group: Sequence[Feed]) -> None:
    """One forward for rows of neighbouring slots. What padding writes lies behind each row's tokens, where it is
    overwritten before it is attended to."""
    longest = max(len(f.token_ids) for f in group)
    if longest == 0:
        return
    runner.forward(
        torch.tensor(
            [[*f.token_ids, *[0] * (longest - len(f.token_ids))] for f in group], device=runner.device
        ),
        torch.tensor([f.start for f in group], device=runner.device),
        num_cached=max(f.start for f in group) + longest,
        first_slot=group[0].slot,
        num_logits=0,
    )


def _groups(feeds: Sequence[Feed], chunk: int, runner: ModelRunner) -> list[list[Feed]]:
    """Runs of neighbouring slots whose padded tokens stay within a chunk and within the slots."""
    assert runner.cache is not None
    room = runner.cache.capacity - SCRATCH
    groups: list[list[Feed]] = []
    for feed in feeds:
        if groups and feed.slot == groups[-1][-1].slot + 1:
            grown = [*groups[-1], feed]
            longest, last_start = max(len(f.token_ids) for f in grown), max(f.start for f in grown)
            if longest * len(grown) <= chunk and last_start + longest <= room:
                groups[-1] = grown
                continue
        groups.append([feed])
    return groups
