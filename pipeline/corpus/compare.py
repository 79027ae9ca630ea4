"""Two corpora of the same prompts from different engines, held together: `python -m pipeline.corpus.compare A B`.

Greedy rows must be the same, but for near-ties: there the first engine's own log-probabilities of the two tokens at the
first difference lie closer than `--max-gap`, which rounding in another order can turn round.
"""

import argparse
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Optional

import numpy as np
from datasets import Dataset

from pipeline.corpus.read import read_corpus

MAX_GAP = 0.3
_NUM_LISTED = 50


@dataclass(frozen=True)
class Difference:
    """Where two greedy responses part. `gap` is between the log-probabilities of the two tokens, None where the second
    one is not among the first's candidates."""

    prompt_id: str
    position: int
    tokens: tuple[Optional[int], Optional[int]]
    gap: Optional[float]


@dataclass
class Comparison:
    """What two corpora have in common. `topk_difference`: largest and mean distance of the candidates' log-probabilities,
    over tokens that both have with the same text before them."""

    num_rows: tuple[int, int] = (0, 0)
    num_common: int = 0
    same_columns: bool = True
    same_accounting: bool = True
    num_greedy: int = 0
    num_greedy_equal: int = 0
    near_ties: list[Difference] = field(default_factory=list)
    other_differences: list[Difference] = field(default_factory=list)
    topk_difference: dict[str, float] = field(default_factory=dict)
    finish_reason: tuple[dict[str, int], ...] = ()
    num_response_tokens: tuple[int, ...] = ()

    @property
    def agrees(self) -> bool:
        """Whether nothing but near-ties tells the corpora apart."""
        same_rows = self.num_rows == (self.num_common, self.num_common)
        return same_rows and self.same_columns and self.same_accounting and not self.other_differences


def compare(first: Path, second: Path, *, max_gap: float = MAX_GAP) -> Comparison:
    """Compare two finished corpus folders, row by row.

    Raises:
        ValueError: one of them is no corpus.
    """
    corpora = [read_corpus(first), read_corpus(second)]
    result = Comparison(num_rows=(len(corpora[0]), len(corpora[1])))
    result.same_columns = corpora[0].features == corpora[1].features
    result.same_accounting = _accounted(first) == _accounted(second)
    result.finish_reason = tuple(dict(Counter(corpus["finish_reason"])) for corpus in corpora)
    distances: list[np.ndarray] = []
    totals = [0, 0]
    for one, other in _pairs(*corpora):
        result.num_common += 1
        totals[0] += len(one["response_token_ids"])
        totals[1] += len(other["response_token_ids"])
        num_same = _num_same(one["response_token_ids"], other["response_token_ids"])
        distances.append(_distances(one, other, num_same))
        if one["temperature"] == 0:
            _judge(result, one, other, num_same, max_gap)
    result.num_response_tokens = (totals[0], totals[1])
    all_distances = np.concatenate(distances) if distances else np.zeros(0)
    if all_distances.size:
        result.topk_difference = {"mean": float(all_distances.mean()), "max": float(all_distances.max())}
    return result


def _accounted(folder: Path) -> Any:
    """What must be the same whoever answered: how many rows there were, and why some are not there."""
    record = json.loads((folder / "corpus.json").read_text())
    return {name: record[name] for name in ("requested", "written", "skipped", "failed", "num_prompt_tokens")}


def _pairs(first: Dataset, second: Dataset) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Rows with the same identity; both corpora are in its order."""
    keys = [list(zip(corpus["prompt_id"], corpus["seed"], strict=True)) for corpus in (first, second)]
    places = {key: place for place, key in enumerate(keys[1])}
    for place, key in enumerate(keys[0]):
        if key in places:
            yield first[place], second[places[key]]


def _num_same(one: list[int], other: list[int]) -> int:
    longest = min(len(one), len(other))
    return next((i for i in range(longest) if one[i] != other[i]), longest)


def _distances(one: dict[str, Any], other: dict[str, Any], num_same: int) -> np.ndarray:
    """Distances of the log-probabilities by rank, up to and with the first token that differs."""
    num = min(num_same + 1, len(one["topk_logprobs"]), len(other["topk_logprobs"]))
    pairs = [np.array(row["topk_logprobs"][:num], dtype=np.float32).ravel() for row in (one, other)]
    return np.abs(pairs[0] - pairs[1]) if pairs[0].shape == pairs[1].shape else np.zeros(0)


def _judge(
    result: Comparison, one: dict[str, Any], other: dict[str, Any], num_same: int, max_gap: float
) -> None:
    result.num_greedy += 1
    ids = one["response_token_ids"], other["response_token_ids"]
    if ids[0] == ids[1]:
        result.num_greedy_equal += 1
        return
    tokens = tuple(side[num_same] if num_same < len(side) else None for side in ids)
    gap = None
    if num_same < len(one["topk_ids"]):
        known = dict(zip(one["topk_ids"][num_same], one["topk_logprobs"][num_same], strict=True))
        if all(token in known for token in tokens):
            gap = abs(known[tokens[0]] - known[tokens[1]])
    difference = Difference(one["prompt_id"], num_same, (tokens[0], tokens[1]), gap)
    is_near = gap is not None and gap <= max_gap
    (result.near_ties if is_near else result.other_differences).append(difference)


def lines(result: Comparison) -> Iterable[str]:
    """The comparison for people."""
    yield f"rows: {result.num_rows[0]} and {result.num_rows[1]}, {result.num_common} of them common"
    yield f"same columns: {result.same_columns}; same accounting: {result.same_accounting}"
    yield f"response tokens: {result.num_response_tokens}; finish reasons: {result.finish_reason}"
    yield (
        f"greedy rows: {result.num_greedy_equal} of {result.num_greedy} equal, {len(result.near_ties)} part at a near-tie, "
        f"{len(result.other_differences)} otherwise"
    )
    yield f"candidates' log-probabilities differ by {result.topk_difference}"
    for name, differences in (("near-tie", result.near_ties), ("DIFFERENCE", result.other_differences)):
        for one in differences[:_NUM_LISTED]:
            gap = "unknown" if one.gap is None else f"{one.gap:.4f}"
            yield f"  {name} {one.prompt_id} at token {one.position}: {one.tokens[0]} against {one.tokens[1]}, gap {gap}"


def main(words: list[str]) -> None:
    """Compare two folders; raises ValueError where they do not agree."""
    parser = argparse.ArgumentParser(prog="python -m pipeline.corpus.compare", description=__doc__)
    parser.add_argument("first", type=Path, help="a finished folder of the corpus stage")
    parser.add_argument("second", type=Path)
    parser.add_argument("--max-gap", type=float, default=MAX_GAP, help="largest gap of a near-tie, in nats")
    parser.add_argument("--json", type=Path, help="write all figures here")
    arguments = parser.parse_args(words)
    result = compare(arguments.first, arguments.second, max_gap=arguments.max_gap)
    print("\n".join(lines(result)))
    if arguments.json:
        arguments.json.write_text(json.dumps(asdict(result), indent=2) + "\n")
    if not result.agrees:
        raise ValueError("the corpora do not agree")


if __name__ == "__main__":
    from pipeline.commands import run_command

    run_command(main)
