"""What a round with a tree costs, and what the clock decides."""

from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

from eval.bench_conditions import Condition
from eval.bench_measure import Measurement
from eval.teacher_forcing import Draft
from eval.tree_choice import predict_all
from eval.tree_timing import TreeTimes, measure_tree_times
from eval.tree_verdict import judge_trees, way_of
from specdec_runtime.medusa_heads import heads_of_target
from specdec_runtime.request import Output
from specdec_runtime.stats import Stats
from specdec_runtime.tree import Tree, make_tree
from tests.unit.eval.test_tree_scores import made_up

TIMES = TreeTimes(
    target_ms={1: 30.0, 2: 30.0, 4: 34.0, 8: 46.0},
    overhead_ms={2: 1.0, 12: 6.0},
    draft_first_ms=3.0,
    draft_ms={1: 2.0, 2: 2.5, 6: 4.5},
)


def test_a_round_is_draft_steps_by_width_verification_and_the_rest() -> None:
    tree = make_tree("3x2x1", max_nodes=63)  # 3, 6 and 6 nodes
    # After the root's step: 3 nodes with children (between 2 and 6), then 6.
    assert TIMES.draft_round_ms(tree) == pytest.approx(3.0 + 3.0 + 4.5)
    assert TIMES.verify_ms(tree) == 46.0  # 16 tokens: beyond what was measured
    assert TIMES.round_ms(tree) == pytest.approx(10.5 + 46.0 + 6.0)
    uneven = Tree((-1, -1, 0))
    assert TIMES.round_ms(uneven) == pytest.approx(3.0 + 2.0 + 34.0 + 1.5)
    heads = TreeTimes(target_ms=TIMES.target_ms, overhead_ms=TIMES.overhead_ms, heads_ms=(1.0, 1.5))
    assert heads.round_ms(uneven) == pytest.approx(1.5 + 34.0 + 1.5)


def test_predictions_are_tau_over_the_price_and_the_best_comes_first() -> None:
    scores = made_up(0, lengths=(60, 40))
    predictions = predict_all(scores, TIMES, max_nodes=6, max_depth=3)
    assert [p.speedup for p in predictions] == sorted((p.speedup for p in predictions), reverse=True)
    assert {p.tree.depth for p in predictions if p.tree.num_nodes == p.tree.depth} == {1, 2, 3}
    for p in predictions:
        assert p.speedup == pytest.approx(p.tau * 30.0 / TIMES.round_ms(p.tree))
        assert p.tree.num_nodes <= 6


@pytest.mark.parametrize("is_medusa", [False, True])
def test_every_width_is_timed(make_model: Callable[..., PreTrainedModel], is_medusa: bool) -> None:
    target = make_model(0)
    draft = Draft(make_model(1, num_layers=1), torch.tensor([3, 5, 7, 9, 11]))
    if is_medusa:
        draft = Draft(heads_of_target(target, num_heads=2, num_layers=1))
    times = measure_tree_times(target, draft, max_nodes=9, max_depth=3, context_tokens=20, num_repeats=2)
    assert list(times.target_ms) == [1, 2, 3, 4, 5, 6, 7, 8, 10]
    assert list(times.overhead_ms) == [2, 12]
    assert min(times.target_ms.values()) > 0
    if is_medusa:
        assert len(times.heads_ms) == 2
    else:
        assert times.draft_ms is not None and list(times.draft_ms) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert times.round_ms(make_tree("3x2", max_nodes=9)) > times.plain_ms / 2


def timed(speeds: list[float], *, gamma: int = 0, tree: str | None = None, tau: float = 1.0) -> Measurement:
    """Prompts of 10 tokens at these speeds."""
    condition = Condition("native", "distilled" if gamma else "none", gamma, 0.0, 1, tree=tree)
    outputs = []
    for _ in speeds:
        stats = Stats(num_prefills=1, num_rounds=round(10 / tau) - 1, num_committed=10, verify_ms=90.0, draft_ms=18.0)
        outputs.append(Output(token_ids=[1] * 10, finish_reason="length", stats=stats))
    return Measurement(condition, [10 / speed for speed in speeds], [10] * len(speeds), outputs)


def test_a_tree_must_be_ahead_of_the_chain_beyond_chance() -> None:
    plain, slow = timed([10, 11, 9, 10]), timed([12, 12, 12, 12], gamma=1)
    chain = timed([14, 15, 13, 14], gamma=2, tau=2.0)
    better = timed([16, 17, 15, 16], gamma=2, tree="3x2", tau=2.5)
    verdict = judge_trees([plain, slow, chain, better], num_bootstrap=200, seed=0)
    assert verdict.chosen is better
    assert "tree 3x2 is faster than chain 2" in verdict.reason and "10 tokens in place of 3" in verdict.reason
    noisy = timed([16, 10, 20, 14], gamma=2, tree="3x2")
    verdict = judge_trees([plain, slow, chain, noisy], num_bootstrap=200, seed=0)
    assert verdict.chosen is chain and "not faster beyond chance" in verdict.reason
    verdict = judge_trees([timed([10]), timed([14], gamma=2), timed([16], gamma=2, tree="3x2")], num_bootstrap=200, seed=0)
    assert way_of(verdict.chosen.condition) == "chain 2", "one prompt shows nothing"
    worse = timed([12, 13, 11, 12], gamma=2, tree="3x2", tau=2.5)
    verdict = judge_trees([plain, slow, chain, worse], num_bootstrap=200, seed=0)
    assert verdict.chosen is chain and verdict.tree_over_chain.high < 1 and "slower" in verdict.reason
    assert "+25%" in verdict.reason
    assert [way_of(m.condition) for m in (plain, chain, worse)] == ["plain", "chain 2", "tree 3x2"]


def test_plain_decoding_is_the_answer_where_nothing_pays() -> None:
    plain, chain, tree = timed([10, 10]), timed([9, 9], gamma=2), timed([8, 8], gamma=2, tree="2x1")
    verdict = judge_trees([plain, chain, tree], num_bootstrap=50, seed=0)
    assert verdict.chosen is plain and "Plain decoding is faster than both: 10.0" in verdict.reason
