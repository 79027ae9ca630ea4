"""Feeds whole prompts (and what a draft has missed) into the slots: in chunks, short ones several rows at a time."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specdec_runtime.cache import SCRATCH
from specdec_runtime.forward import ModelRunner


class Feed(NamedTuple):
    """Tokens to put into a slot from position `start` on."""

    slot: int
    token_ids: Sequence[int]
    start: int


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
    runner: ModelRunner, prompts: Sequence[Sequence[int]], *, first_slot: int, chunk: int
) -> Tensor:
    """Feeds the prompts into consecutive slots; returns the logits [B, 1, V] after the last token of each."""
    logits = []
    feeds = [Feed(first_slot + i, prompt, 0) for i, prompt in enumerate(prompts)]
    for group in _groups(feeds, chunk, runner):
        if len(group) == 1:
            last = runner.prefill(group[0].token_ids, 0, slot=group[0].slot, chunk=chunk, wants_logits=True)
        else:
            # All but the last tokens without the head, which is then run on one position per row only.
            _feed_padded(runner, [Feed(f.slot, f.token_ids[:-1], 0) for f in group])
            starts = [len(f.token_ids) - 1 for f in group]
            last = runner.forward(
                torch.tensor([[f.token_ids[-1]] for f in group], device=runner.device),
                torch.tensor(starts, device=runner.device),
                num_cached=max(starts) + 1,
                first_slot=group[0].slot,
            )
        assert last is not None
        logits.append(last)
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
