"""What is a near tie is measured: by how far the two best tokens' gap moves between two plain runs."""

from collections.abc import Sequence

import pytest

from pipeline.serving_ties import find_differences, gap_noise
from specdec_runtime.request import Logprobs, Output
from specdec_runtime.stats import Stats

Step = Sequence[tuple[int, float]]


def output(steps: Sequence[Step]) -> Output:
    """Greedy: each step's first id is the token; (id, log-probability) from best to worst."""
    logprobs = Logprobs(
        [step[0][1] for step in steps], [[i for i, _ in step] for step in steps], [[v for _, v in step] for step in steps]
    )  # fmt: skip
    return Output([step[0][0] for step in steps], "length", Stats(), logprobs=logprobs)


SURE = [(5, -0.1), (6, -3.0), (7, -4.0)]
CLOSE = [(8, -1.0), (9, -1.25), (7, -4.0)]


def test_noise_is_how_far_the_gap_moves_on_common_ground() -> None:
    """The close step's gap of 0.25 becomes 0, then -0.5, which turns the token; the sure step's gap is too wide to matter."""
    one = output([SURE, CLOSE, CLOSE])
    wider, tied = [(5, -0.1), (6, -9.0), (7, -9.1)], [(8, -1.125), (9, -1.125), (7, -4.0)]
    other = output([wider, tied, [(9, -0.9), (8, -1.4), (7, -4.0)]])
    noise = gap_noise([one], [other], rows=(8, 24))
    assert (noise.num_positions, noise.num_identical, noise.num_prompts) == (2, 0, 1)
    assert noise.largest == pytest.approx(0.75)
    assert noise.median == pytest.approx(0.5)
    assert noise.largest_turned_gap == pytest.approx(0.25)
    same = gap_noise([one], [output([SURE, CLOSE, CLOSE])], rows=(8, 24))
    assert (same.num_identical, same.largest, same.largest_turned_gap) == (1, 0.0, 0.0)


def test_after_the_first_difference_nothing_is_compared() -> None:
    one = output([CLOSE, CLOSE])
    other = output([[(9, -1.0), (8, -1.1), (7, -4.0)], [(8, -1.0), (9, -2.9), (7, -4.0)]])
    noise = gap_noise([one], [other], rows=(8, 24))
    assert noise.num_positions == 1
    assert noise.largest == pytest.approx(0.35)


@pytest.mark.parametrize(
    ("token", "max_gap", "near"),
    [(9, 0.3, True), (9, 0.2, False), (7, 5.0, False), (4, 5.0, False)],
    ids=["second, gap within the noise", "second, gap beyond it", "third", "not among the best"],
)
def test_a_near_tie_is_the_second_choice_within_the_noise(token: int, max_gap: float, near: bool) -> None:
    plain = output([SURE, CLOSE])
    [difference] = find_differences([plain], [[5, token]], max_gap=max_gap)
    assert (difference.position, difference.plain_token, difference.token) == (1, 8, token)
    assert difference.top2_gap == pytest.approx(0.25)
    assert difference.is_near_tie is near


def test_the_same_text_is_no_difference_and_a_shorter_one_is_no_tie() -> None:
    plain = output([SURE, CLOSE])
    assert find_differences([plain], [[5, 8]], max_gap=1.0) == []
    [difference] = find_differences([plain], [[5]], max_gap=1.0)
    assert (difference.token, difference.is_near_tie) == (None, False)
