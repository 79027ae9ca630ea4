"""A search for a tree on one page: acceptance by rank, prices, predictions, and what the clock said."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from eval.tree_choice import TreePrediction, is_chain, topology_of
from eval.tree_scores import GuessScores
from eval.tree_timing import TreeTimes
from eval.tree_verdict import TreeVerdict
from pipeline.markdown import table_lines

Row = dict[str, Any]
NUM_SHOWN = 8


def markdown_page(
    scores: GuessScores,
    times: TreeTimes,
    predictions: Sequence[TreePrediction],
    rows: Iterable[Mapping[str, Any]],
    verdict: TreeVerdict,
    *,
    setting: str,
) -> str:
    """The page; `rows` are those of the bench, with their `way`."""
    parts = [
        f"## How often the guess of each rank stands, T = {scores.temperature:g}, {scores.num_positions} positions",
        _by_rank(scores),
        "## What a forward costs",
        _prices(times),
        "## Predicted",
        _predictions(predictions),
        "## By the clock",
        _measured(rows),
        verdict.reason,
        f"Use: `{setting}`",
    ]
    return "\n\n".join(parts) + "\n"


def _by_rank(scores: GuessScores) -> str:
    rates = scores.by_rank()
    heading = ["depth", *(f"guess {rank}" for rank in range(1, len(rates[0]) + 1)), "any"]
    return _table(
        heading,
        ([str(depth), *(f"{x:.3f}" for x in row), f"{sum(row):.3f}"] for depth, row in enumerate(rates, 1)),
    )


def _prices(times: TreeTimes) -> str:
    lines = [
        ["target, tokens per row", *map(str, times.target_ms)],
        ["ms", *(f"{ms:.1f}" for ms in times.target_ms.values())],
        ["over one token", *(f"{ms / times.plain_ms:.2f}" for ms in times.target_ms.values())],
    ]
    page = [_table(lines[0], lines[1:])]
    if times.heads_ms:
        page.append(_table(["heads", *map(str, range(1, len(times.heads_ms) + 1))], [["ms", *_ms(times.heads_ms)]]))
    else:
        assert times.draft_ms is not None
        page.append(
            _table(
                ["draft, nodes per row", "first step", *map(str, times.draft_ms)],
                [["ms", *_ms([times.draft_first_ms, *times.draft_ms.values()])]],
            )
        )
    overheads = ", ".join(f"{ms:.1f} ms with {num} nodes" for num, ms in times.overhead_ms.items())
    return "\n\n".join([*page, f"Outside both models a round takes {overheads}."])


def _predictions(predictions: Sequence[TreePrediction]) -> str:
    """The best trees and the best chains."""
    trees = [p for p in predictions if not is_chain(p.tree)][:NUM_SHOWN]
    chains = [p for p in predictions if is_chain(p.tree)]
    shown = sorted([*trees, *chains], key=lambda p: -p.speedup)
    return _table(
        ["tree", "nodes", "depth", "tokens per round", "round ms", "predicted speedup"],
        (
            [
                f"chain {p.tree.depth}" if is_chain(p.tree) else topology_text(topology_of(p.tree)), str(p.tree.num_nodes),
                str(p.tree.depth), f"{p.tau:.2f}", f"{p.round_ms:.1f}", f"{p.speedup:.3f}",
            ]
            for p in shown
        ),
    )  # fmt: skip


def _measured(rows: Iterable[Mapping[str, Any]]) -> str:
    names = ("draft_ms_per_round", "verify_ms_per_round", "overhead_ms_per_round", "tokens_per_second")
    return _table(
        ["way", "tokens per forward", "draft ms", "verify ms", "overhead ms", "tokens/s", "speedup", "95% interval"],
        (
            [
                row["way"] if row["tree"] is None else f"tree {topology_text(row['tree'])}",
                f"{row['block_efficiency']:.2f}",
                *(f"{row[name]:.1f}" for name in names),
                f"{row['walltime_speedup']:.3f}",
                f"{row['low']:.3f} to {row['high']:.3f}",
            ]
            for row in rows
        ),
    )


def topology_text(topology: str | Sequence[int]) -> str:
    """As a setting has it."""
    return topology if isinstance(topology, str) else f"[{','.join(map(str, topology))}]"


def _ms(values: Iterable[float]) -> list[str]:
    return [f"{ms:.1f}" for ms in values]


def _table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(table_lines(heading, rows))
