"""The sampling policy: exact shares, stable seeds, samples that differ."""

from collections import Counter
from itertools import islice

import pytest

from pipeline.corpus.policy import Dealer, plan_rows, row_seed, share_temperatures
from pipeline.corpus.rows import make_prompt
from pipeline.corpus_schema import CorpusConfig, ShareConfig
from tests.conftest import Composer

SHARES = [ShareConfig(0.5, 0.0), ShareConfig(0.3, 1.0, 0.9), ShareConfig(0.2, 0.7)]
PROMPTS = [make_prompt([1, i], source="s", row=str(i), domain="d") for i in range(100)]


def test_shares_are_exact_at_every_length() -> None:
    corpus = CorpusConfig(shares=SHARES)
    sampled = [(row.temperature, row.top_p) for row in plan_rows(PROMPTS, corpus)]
    assert Counter(sampled) == {(0.0, 1.0): 50, (1.0, 0.9): 30, (0.7, 1.0): 20}
    for length in range(1, 100):
        for share in SHARES:
            num = sampled[:length].count((share.temperature, share.top_p))
            assert abs(num - share.share * length) <= 1
    assert share_temperatures(corpus) == [0.0, 1.0, 0.7]


def test_equal_shares_take_turns() -> None:
    temperatures = [row.temperature for row in plan_rows(PROMPTS[:6], CorpusConfig())]
    assert temperatures == [0.0, 1.0] * 3
    thirds = [ShareConfig(1 / 3, t) for t in (0.0, 1.0, 0.5)]
    assert [row.temperature for row in plan_rows(PROMPTS[:6], CorpusConfig(shares=thirds))] == [0.0, 1.0, 0.5] * 2


@pytest.mark.parametrize("shares", [[(0.25, 0.0), (0.75, 1.0)], [(0.2, 0.0), (0.5, 1.0), (0.3, 0.7)]])
def test_samples_of_a_prompt_differ_and_one_at_most_is_greedy(shares: list[tuple[float, float]]) -> None:
    corpus = CorpusConfig(shares=[ShareConfig(*share) for share in shares], samples_per_prompt=4)
    rows = list(plan_rows(PROMPTS, corpus))
    assert len(rows) == 400 == len({row.row_id for row in rows}) == len({row.seed for row in rows})
    for start in range(0, 400, 4):
        samples = rows[start : start + 4]
        assert len({row.prompt_id for row in samples}) == 1 and [row.sample_index for row in samples] == [0, 1, 2, 3]
        assert sum(row.temperature == 0 for row in samples) <= 1
    counts = Counter(row.temperature for row in rows)
    assert all(abs(counts[temperature] - 400 * share) <= 1 for share, temperature in shares)


def test_greedy_samples_that_would_repeat_are_refused() -> None:
    with pytest.raises(ValueError, match=r"samples_per_prompt=3 with a share of 0.5 at temperature 0.*0\.333"):
        CorpusConfig(samples_per_prompt=3)


def test_seeds_are_the_rows_own() -> None:
    """speculators 716: the seed follows from the content, not from the place in the file."""
    corpus = CorpusConfig(shares=[ShareConfig(1.0, 1.0)], seed=3)
    forth = {row.prompt_id: row.seed for row in plan_rows(PROMPTS, corpus)}
    back = {row.prompt_id: row.seed for row in plan_rows(PROMPTS[::-1], corpus)}
    assert forth == back
    seed = row_seed(3, PROMPTS[0].prompt_id, 1.0, 1.0, 0)
    assert forth[PROMPTS[0].prompt_id] == seed and 0 <= seed < 2**63
    others = [(4, 1.0, 1.0, 0), (3, 0.9, 1.0, 0), (3, 1.0, 0.9, 0), (3, 1.0, 1.0, 1)]
    assert len({seed, *(row_seed(s, PROMPTS[0].prompt_id, t, p, i) for s, t, p, i in others)}) == 5
    assert row_seed(0, "x", 1.0, 1.0, 0) == 8850524992321000066, "seeds of finished corpora stay what they were"


def test_rows_carry_what_their_prompt_says_and_come_lazily() -> None:
    def endless():  # type: ignore[no-untyped-def]
        yield PROMPTS[0]
        raise RuntimeError("read too far")

    row = next(plan_rows(endless(), CorpusConfig(max_new_tokens=9)))
    assert (row.source, row.domain, row.prompt_token_ids, row.max_new_tokens, row.row) == ("s", "d", (1, 0), 9, "0")


def test_dealing_catches_up_with_what_was_barred() -> None:
    dealer = Dealer([1.0, 1.0])
    dealt = []
    for turn in range(12):
        index = dealer.next(frozenset([0]) if turn < 4 else frozenset())
        dealer.take(index)
        dealt.append(index)
    assert dealt == [1, 1, 1, 1, 0, 0, 0, 0, 0, 1, 0, 1]


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ("[]", "add up to 0"),
        ("[{share: 0.5, temperature: 0.0}]", r"add up to 0\.5"),
        ("[{share: 0.5, temperature: -1.0},{share: 0.5}]", "temperature be >= 0"),
        ("[{share: 1.0, top_p: 0.0}]", "top_p must lie"),
    ],
)
def test_shares_that_mean_nothing_are_refused(make_config: Composer, shares: str, message: str) -> None:
    with pytest.raises(Exception, match=message):
        make_config(f"corpus.shares={shares}")


def test_shares_are_set_from_the_command_line(make_config: Composer) -> None:
    config = make_config("corpus.shares=[{share: 0.25, temperature: 0.0}, {share: 0.75, temperature: 0.8, top_p: 0.95}]")
    assert config.corpus.shares == [ShareConfig(0.25, 0.0), ShareConfig(0.75, 0.8, 0.95)]


def test_many_rows_are_planned_without_holding_them() -> None:
    prompts = (PROMPTS[i % 100] for i in range(10**9))
    assert len(list(islice(plan_rows(prompts, CorpusConfig()), 50))) == 50
