"""The ids that the draft's head is trimmed to; with `draft.vocab_shortlist=auto`, how many of them.

A smaller head makes the draft's step cheaper and the proposals worse: a token outside the shortlist is never proposed. With
c(N) = share of held-out response tokens among the N most frequent ids, and alpha = `draft.expected_acceptance`, that of a
draft with the whole vocabulary, a head of N rows is expected to be accepted at alpha * c(N), and the N that is chosen is the
one of the highest predicted speedup (`eval.theory`) with step times that are measured on this device.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel

from distill.config import AUTO
from distill.draft_init import frequent_token_ids, rank_token_ids, shortlist_coverage
from eval.theory import StepTimes, speedup_iid
from eval.timing import measure_head_times
from pipeline.context import StageContext
from pipeline.corpus.chat import stop_ids
from pipeline.corpus.target_info import load_target_info
from pipeline.held_out import CorpusParts
from pipeline.initial_draft import candidate_draft
from pipeline.models import load_tokenizer
from pipeline.report import read_result
from pipeline.store import write_json

#: The choice, in the stage's folder.
CHOICE = "shortlist.json"
SMALLEST_SIZE = 2048
#: Speedups that are closer to the best one than this are ties, which go to the larger head: timing tells no finer.
TIE = 0.01
MAX_TIMING_SECONDS = 40.0


@dataclass(frozen=True)
class SizeOutlook:
    """What a head of `num_ids` rows promises: `speedup` at `gamma`, the best one, with acceptance `acceptance_rate`."""

    num_ids: int
    coverage: float
    acceptance_rate: float
    T_draft_ms: float
    T_draft_first_ms: float
    gamma: int
    speedup: float


def shortlist(context: StageContext, train_rows: Dataset) -> list[int] | None:
    """The ids that the draft's head is trimmed to, ascending: the most frequent ones of the training rows."""
    num_ids = context.config.draft.shortlist_size
    if num_ids is None:
        return None
    return frequent_token_ids(train_rows, num_ids, special_ids(context))


def special_ids(context: StageContext) -> list[int]:
    """The ids that every shortlist has: the tokenizer's special ones, and those that end the target's text.

    Ids that the target's head lacks are left out: some tokenizers have a pad token that was added behind its vocabulary.
    """
    path, trust = context.target.path, context.target.trust_remote_code
    tokenizer, info = load_tokenizer(path, trust), load_target_info(path, trust)
    found = {*tokenizer.all_special_ids, *stop_ids(info, tokenizer)}
    return sorted(token_id for token_id in found if token_id < info.vocab_size)


def with_chosen_shortlist(
    context: StageContext, target: PreTrainedModel, parts: CorpusParts
) -> tuple[StageContext, dict[str, Any] | None]:
    """The context with a number, or None for the whole head, in the place of `auto`; and the choice with its table.

    The choice is written to `CHOICE` and read from there, so that a killed stage goes on with the same one, whatever the
    clock would say the next time. A context without `auto` is returned as it is.
    """
    config = context.config
    if config.draft.vocab_shortlist != AUTO:
        return context, None
    path = context.work_dir / CHOICE
    if not path.is_file():
        write_json(path, _choose(context, target, parts))
        Console(highlight=False).print(choice_table(read_result(context.work_dir, CHOICE)))
    choice = read_result(context.work_dir, CHOICE)
    draft = replace(config.draft, vocab_shortlist=choice["vocab_shortlist"])
    return replace(context, config=replace(config, draft=draft)), choice


def sizes_to_try(vocab_size: int, num_special: int) -> list[int]:
    """`SMALLEST_SIZE`, twice that, and so on, and the whole vocabulary; none that would not hold the special ids."""
    sizes: list[int] = []
    size = SMALLEST_SIZE
    while size < vocab_size:
        if size >= num_special:
            sizes.append(size)
        size *= 2
    return [*sizes, vocab_size]


def size_outlooks(
    sizes: Sequence[int], coverage: Sequence[float], times: Sequence[StepTimes], *, expected_acceptance: float
) -> list[SizeOutlook]:
    """The prediction for each size; a speedup below 1 is possible, since some gamma >= 1 is asked for."""
    outlooks = []
    for num_ids, covered, one in zip(sizes, coverage, times, strict=True):
        alpha = expected_acceptance * covered
        speedups = {gamma: speedup_iid(alpha, gamma, one) for gamma in range(1, one.max_gamma + 1)}
        gamma = max(speedups, key=speedups.__getitem__)
        first_ms = one.mean_draft_ms(1)
        outlooks.append(SizeOutlook(num_ids, covered, alpha, one.draft_ms, first_ms, gamma, speedups[gamma]))
    return outlooks


def best_outlook(outlooks: Sequence[SizeOutlook]) -> SizeOutlook:
    """The highest predicted speedup; of several within `TIE`, the one with the largest head."""
    highest = max(outlook.speedup for outlook in outlooks)
    ties = [outlook for outlook in outlooks if outlook.speedup >= (1 - TIE) * highest]
    return max(ties, key=lambda outlook: outlook.num_ids)


def _choose(context: StageContext, target: PreTrainedModel, parts: CorpusParts) -> dict[str, Any]:
    config = context.config
    draft = candidate_draft(config, target)
    special = special_ids(context)
    vocab_size = int(target.get_output_embeddings().weight.shape[0])
    draft_rows = int(draft.get_output_embeddings().weight.shape[0])
    ranked = rank_token_ids(parts.train, vocab_size, special)
    sizes = [size for size in sizes_to_try(vocab_size, len(special)) if size <= draft_rows or size == vocab_size]
    times = measure_head_times(
        target,
        draft,
        # Which rows is the same to the clock; the whole head is the draft's own.
        [None if size == vocab_size else torch.arange(size) for size in sizes],
        max_gamma=config.preflight.max_gamma,
        context_tokens=config.preflight.context_tokens,
        num_repeats=config.preflight.num_repeats,
        max_seconds=MAX_TIMING_SECONDS,
    )
    outlooks = size_outlooks(
        sizes,
        shortlist_coverage(ranked, parts.validation, sizes),
        times,
        expected_acceptance=config.draft.expected_acceptance,
    )
    best = best_outlook(outlooks)
    return {
        "vocab_shortlist": None if best.num_ids == vocab_size else best.num_ids,
        "chosen": asdict(best),
        "expected_acceptance": config.draft.expected_acceptance,
        "T_target_ms": {str(width): ms for width, ms in enumerate(times[0].target_ms, start=1)},
        "overhead_ms": times[0].overhead_ms,
        "sizes": [asdict(outlook) for outlook in outlooks],
    }


def choice_table(choice: Mapping[str, Any]) -> Table:
    """The sizes that were compared, the chosen one in bold."""
    table = Table(
        title=f"size of the draft's head: predicted speedup if the whole vocabulary were accepted at {choice['expected_acceptance']:g}",
        caption=f"target step {choice['T_target_ms']['1']:.2f} ms; coverage: share of held-out tokens; within {TIE:.0%} the larger wins",
    )
    for heading in ("ids", "coverage", "draft ms", "gamma", "speedup"):
        table.add_column(heading, justify="right")
    for row in choice["sizes"]:
        table.add_row(
            str(row["num_ids"]),
            f"{row['coverage']:.3f}",
            f"{row['T_draft_ms']:.2f}",
            str(row["gamma"]),
            f"{row['speedup']:.3f}",
            style="bold" if row["num_ids"] == choice["chosen"]["num_ids"] else None,
        )
    return table


def shortlist_figures(choice: Mapping[str, Any] | None) -> dict[str, object]:
    """The choice in a line, where there was one; the table stays in the record."""
    if choice is None:
        return {}
    chosen = choice["chosen"]
    return {
        "shortlist_num_ids": chosen["num_ids"],
        "shortlist_coverage": chosen["coverage"],
        "shortlist_predicted_speedup": chosen["speedup"],
    }


def times_of_chosen_head(times: StepTimes, distill_folder: Path) -> StepTimes:
    """`times` of the preflight, which knows only the whole head with `auto`, with those of the head that was chosen."""
    choice = read_result(distill_folder, "train.json").get("shortlist_choice")
    if choice is None:
        return times
    chosen = choice["chosen"]
    return replace(times, draft_ms=chosen["T_draft_ms"], draft_first_ms=chosen["T_draft_first_ms"])
