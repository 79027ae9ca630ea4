"""The leaderboard's table: speedup and tokens per target forward by group of categories and over all.

A group's speedup is its tokens per second over those of the strongest plain decoding (over all prompts), on the same
prompts. Tokens per forward count the prefill and its token, as `block_efficiency` does.
"""

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from eval.bench_conditions import tree_name
from eval.bootstrap import bootstrap_speedup
from eval.draft_verdict import shows_gain
from pipeline.markdown import table_lines

Row = dict[str, Any]
GROUPS = ("MT-bench", "translation", "summarization", "QA", "math", "RAG")
_GROUP_OF = {
    **dict.fromkeys(
        ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"), "MT-bench"
    ),
    "translation": "translation",
    "summarization": "summarization",
    "qa": "QA",
    "math_reasoning": "math",
    "rag": "RAG",
}
PLAIN = "none"


def group_of(category: str) -> str:
    """The leaderboard's column of a question's category; an unknown category is a column of its own."""
    return _GROUP_OF.get(category, category or "all")


def leaderboard(rows: Sequence[Row], *, num_bootstrap: int = 1000, seed: int = 0) -> list[Row]:
    """One row per way to decode: {backend, draft, gamma, groups: {group: cell}, overall: cell}; rows of `rows.jsonl`.

    A cell: speedup with its 95% interval over prompts, tokens_per_forward, tokens_per_second, num_prompts.

    Raises:
        ValueError: no prompt was measured.
    """
    if not rows:
        raise ValueError("no prompt was measured: raise bench.max_minutes, or leave it null")
    ways = [_way(entry) for entry in rows[0]["conditions"]]
    plain = max((i for i, way in enumerate(ways) if way["draft"] == PLAIN), key=lambda i: _speed(rows, i))
    found = {row["group"] for row in rows}
    groups = [*(g for g in GROUPS if g in found), *sorted(found - set(GROUPS))]
    options = {"num_bootstrap": num_bootstrap, "seed": seed}
    return [
        {
            **way,
            "is_baseline": i == plain,
            "groups": {g: _cell([r for r in rows if r["group"] == g], i, plain, options) for g in groups},
            "overall": _cell(rows, i, plain, options),
        }
        for i, way in enumerate(ways)
    ]


def _way(entry: Row) -> Row:
    # Rows that were measured before there were trees have none.
    return {**{name: entry[name] for name in ("backend", "draft", "gamma", "gamma_policy")}, "tree": entry.get("tree")}


def _sum(rows: Sequence[Row], way: int, name: str) -> float:
    return float(sum(row["conditions"][way][name] for row in rows))


def _speed(rows: Sequence[Row], way: int) -> float:
    return _sum(rows, way, "num_tokens") / _sum(rows, way, "seconds")


def _cell(rows: Sequence[Row], way: int, plain: int, options: dict[str, int]) -> Row:
    columns = [
        [row["conditions"][which][name] for row in rows]
        for which in (way, plain)
        for name in ("num_tokens", "seconds")
    ]
    speedup, num_forwards = bootstrap_speedup(*columns, **options), _sum(rows, way, "num_forwards")
    return {
        "speedup": speedup.value,
        "low": speedup.low,
        "high": speedup.high,
        "tokens_per_forward": _sum(rows, way, "num_tokens") / num_forwards if num_forwards else None,
        "tokens_per_second": _speed(rows, way),
        "num_prompts": len(rows),
    }


def way_name(row: Row) -> str:
    """How the table calls a way to decode."""
    if row["draft"] == PLAIN:
        return f"plain ({row['backend']}{', baseline' if row['is_baseline'] else ''})"
    gamma = f"auto <= {row['gamma']}" if row["gamma_policy"] == "auto" else row["gamma"]
    backend = "" if row["backend"] == "native" else f", {row['backend']}"
    how = f"gamma {gamma}" if row["tree"] is None else f"tree {tree_name(row['tree'])}"
    return f"{row['draft']} ({how}{backend})"


def _cells(row: Row) -> list[str]:
    cells = []
    for cell in (*row["groups"].values(), row["overall"]):
        tau = cell["tokens_per_forward"]
        cells.append(f"{cell['speedup']:.2f}x / {'-' if tau is None else f'{tau:.2f}'}")
    return cells


def leaderboard_table(result: Sequence[Row]) -> Table:
    """For the terminal."""
    table = Table(title="speedup / tokens per target forward, by category (batch 1)")
    table.add_column("decoding")
    for group, cell in result[0]["groups"].items():
        table.add_column(f"{group} ({cell['num_prompts']})", justify="right")
    for heading in ("overall", "95% interval", "tokens/s"):
        table.add_column(heading, justify="right")
    for row in result:
        overall = row["overall"]
        interval = f"{overall['low']:.2f} to {overall['high']:.2f}"
        style = "bold green" if shows_gain(overall["low"], overall["high"]) else None
        table.add_row(way_name(row), *_cells(row), interval, f"{overall['tokens_per_second']:.1f}", style=style)
    return table


def leaderboard_markdown(result: Sequence[Row]) -> str:
    """For a page."""
    heads = ["decoding", *(f"{g} ({c['num_prompts']})" for g, c in result[0]["groups"].items()), "overall", "95% interval"]
    rows = [[way_name(row), *_cells(row), f"{row['overall']['low']:.2f} to {row['overall']['high']:.2f}"] for row in result]
    return "\n".join(table_lines(heads, rows)) + "\n"
