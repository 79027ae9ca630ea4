"""Corpora of two engines held together: what is a near-tie, what is a fault, and what must be the same."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pipeline.corpus.accounting import Accounting
from pipeline.corpus.answer_folder import AnswerFolder
from pipeline.corpus.backends.base import FinishedRow
from pipeline.corpus.compare import Comparison, compare, lines, main
from tests.unit.pipeline.corpus_contract import make_rows


def finished(token_ids: list[int], number: int, *, temperature: float = 0.0) -> FinishedRow:
    """Candidates 5, 6, 7 with log-probabilities -1, -1.1, -4 at each token."""
    row = replace(make_rows()[0], prompt_id=f"p{number}", seed=number, temperature=temperature)
    ids = np.tile(np.array([5, 6, 7], np.int32), (len(token_ids), 1))
    logprobs = np.tile(np.array([-1.0, -1.1, -4.0], np.float16), (len(token_ids), 1))
    return FinishedRow(row, token_ids, "length", ids, logprobs)


def write(folder: Path, rows: list[FinishedRow]) -> Path:
    folder.mkdir(exist_ok=True)
    answers = AnswerFolder(folder / "shards")
    for one in rows:
        answers.write([one])
    accounting = Accounting(num_requested=len(rows))
    accounting.count_shards(answers.files())
    (folder / "corpus.json").write_text(json.dumps(accounting.to_dict()))
    return folder


def compared(tmp_path: Path, first: list[FinishedRow], second: list[FinishedRow]) -> Comparison:
    return compare(write(tmp_path / "a", first), write(tmp_path / "b", second))


def test_near_ties_are_listed_with_their_gaps(tmp_path: Path) -> None:
    """vllm 41758: greedy differs between engines where two tokens are nearly equally likely, and nowhere else."""
    first = [finished([5, 5, 5], 0), finished([5, 5], 1), finished([7, 7], 2, temperature=1.0)]
    second = [finished([5, 6, 7], 0), finished([5, 5], 1), finished([6, 5], 2, temperature=1.0)]
    result = compared(tmp_path, first, second)
    assert (result.num_greedy, result.num_greedy_equal, result.agrees) == (2, 1, True)
    (tie,) = result.near_ties
    assert (tie.prompt_id, tie.position, tie.tokens) == ("p0", 1, (5, 6)) and tie.gap == pytest.approx(
        0.1, abs=1e-3
    )
    assert any("near-tie p0 at token 1: 5 against 6, gap 0.09" in line for line in lines(result))


@pytest.mark.parametrize("ids", [[5, 7, 5], [5, 9, 5], [5, 5]])
def test_other_differences_are_faults(tmp_path: Path, ids: list[int]) -> None:
    result = compared(tmp_path, [finished([5, 5, 5], 0)], [finished(ids, 0)])
    assert not result.agrees and len(result.other_differences) == 1 and not result.near_ties


def test_a_missing_row_is_a_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [finished([5], 0), finished([5], 1)]
    result = compared(tmp_path, rows, rows[:1])
    assert not result.agrees and not result.same_accounting
    with pytest.raises(ValueError, match="do not agree"):
        main([str(tmp_path / "a"), str(tmp_path / "b"), "--json", str(tmp_path / "out.json")])
    assert "2 and 1, 1 of them common" in capsys.readouterr().out
    assert json.loads((tmp_path / "out.json").read_text())["num_rows"] == [2, 1]


def test_the_candidates_distance_is_measured_where_the_text_is_the_same(tmp_path: Path) -> None:
    other = finished([5, 5, 6, 6], 0)
    assert other.topk_logprobs is not None
    other.topk_logprobs[1] -= np.float16(0.5)
    other.topk_logprobs[3] -= np.float16(8.0)
    result = compared(tmp_path, [finished([5, 5, 5, 5], 0)], [other])
    assert result.topk_difference["max"] == pytest.approx(0.5, abs=2e-3)
    assert result.topk_difference["mean"] == pytest.approx(0.5 / 3, abs=2e-3)
