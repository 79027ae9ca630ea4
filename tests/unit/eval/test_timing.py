"""Step times with a clock that the test turns."""

from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

from eval import timing
from eval.timing import measure_head_times, measure_step_times, model_of_shape


def test_medians_are_of_alternated_runs_without_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    calls: list[int] = []

    def step_of(index: int) -> Callable[[], None]:
        def step() -> None:
            nonlocal now_s
            # The first two calls of each are slow, as first calls are; later ones take index + 1 ms.
            now_s += 1.0 if calls.count(index) < 2 else (index + 1) / 1e3
            calls.append(index)

        return step

    monkeypatch.setattr(timing.time, "perf_counter", lambda: now_s)
    medians = timing.alternated_medians([step_of(i) for i in range(3)], torch.device("cpu"), 5, 100.0)
    assert medians == pytest.approx([1.0, 2.0, 3.0])
    assert calls[6:12] in ([2, 1, 0, 0, 1, 2], [0, 1, 2, 2, 1, 0])
    assert len(calls) == 3 * 7


def test_a_time_limit_leaves_one_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    timing.alternated_medians([lambda: calls.append(1)], torch.device("cpu"), 50, max_seconds=0.0)
    assert len(calls) == 3


def test_every_width_and_the_draft_are_timed(make_model: Callable[..., PreTrainedModel]) -> None:
    times = measure_step_times(
        make_model(0),
        make_model(1, num_layers=1),
        max_gamma=3,
        context_tokens=20,
        batch_size=2,
        num_repeats=2,
        draft_vocab_ids=torch.tensor([3, 5, 9]),
    )
    assert times.max_gamma == 3
    assert min(*times.target_ms, times.draft_ms) > 0
    assert times.draft_first_ms is not None
    assert times.overhead_ms >= 0
    assert times.mean_draft_ms(1) == times.draft_first_ms
    assert times.mean_draft_ms(3) == pytest.approx((times.draft_first_ms + 2 * times.draft_ms) / 3)


def test_heads_are_timed_beside_each_other(
    make_model: Callable[..., PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One target, and for each head the draft's steps over one and two tokens, in the order of the heads."""
    monkeypatch.setattr(timing, "alternated_medians", lambda steps, *_: [float(i) for i in range(1, len(steps) + 1)])
    monkeypatch.setattr(timing, "measure_overhead_ms", lambda *_, draft_vocab_ids, **__: 0.5 if draft_vocab_ids is None else 9.0)
    heads = [torch.tensor([3, 5, 9]), None]
    narrow, whole = measure_head_times(make_model(0), make_model(1, num_layers=1), heads, max_gamma=2, context_tokens=20)
    assert narrow.target_ms == whole.target_ms == (1.0, 2.0, 3.0)
    assert (narrow.draft_ms, narrow.draft_first_ms) == (4.0, 5.0)
    assert (whole.draft_ms, whole.draft_first_ms) == (6.0, 7.0)
    assert narrow.overhead_ms == whole.overhead_ms == 0.5


@pytest.mark.parametrize("arguments", [{"max_gamma": 0}, {"max_gamma": 2, "context_tokens": 126}])
def test_what_does_not_fit_is_refused(
    make_model: Callable[..., PreTrainedModel], arguments: dict[str, int]
) -> None:
    with pytest.raises(ValueError, match="max_gamma"):
        measure_step_times(make_model(0), make_model(1), **arguments)


def test_shapes_without_weights_are_seeded_and_leave_the_random_stream_alone(
    make_model: Callable[..., PreTrainedModel],
) -> None:
    config = make_model(0).config
    state = torch.random.get_rng_state()
    first, second = (model_of_shape(config, dtype=torch.bfloat16, seed=4) for _ in range(2))
    assert torch.equal(state, torch.random.get_rng_state())
    assert torch.equal(first.lm_head.weight, second.lm_head.weight)
    assert first.dtype == torch.bfloat16
    assert not first.training
