"""The benchmark on tiny models: right pairing, right baseline, right keys, tokens checked."""

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from eval.bench import BenchResult, run_bench
from eval.bench_conditions import BackendFactory, Condition, conditions_at
from eval.bench_measure import Measurement, measure
from eval.bench_rows import bench_row, predict, strongest_baseline, token_latencies_ms
from eval.config import BenchConfig
from eval.teacher_forcing import Draft
from specdec_runtime import DecoderConfig, Output, Request, Stats
from specdec_runtime.medusa_heads import heads_of_target

REPORT_KEYS = {
    "backend", "draft", "temperature", "gamma", "batch", "tokens_per_second", "walltime_speedup", "low", "high",
    "predicted_speedup", "block_efficiency", "latency_ms_p50", "latency_ms_p99", "lossless",
}  # fmt: skip
PROMPTS = [[3, 4, 5], [9, 8, 7, 6], [30], [11, 12, 13, 14, 15], [21, 5]]


@pytest.fixture(scope="module")
def result(make_model: Callable[..., PreTrainedModel]) -> BenchResult:
    target = make_model(0)
    config = BenchConfig(
        num_prompts=3, max_new_tokens=12, gammas=[1, 3], undistilled_gammas=[1], temperatures=[0.0, 1.0], batch_sizes=[1, 2],
        backends=["native", "hf_generate", "hf_assisted"], num_check_prompts=2, num_bootstrap=100,
    )  # fmt: skip
    drafts = {"undistilled": Draft(make_model(1, num_layers=1)), "distilled": Draft(target)}
    return run_bench(target, drafts, PROMPTS, config)


def rows_where(result: BenchResult, **wanted: object) -> list[dict[str, Any]]:
    return [row for row in result.rows if all(row[key] == value for key, value in wanted.items())]


def test_every_condition_has_one_row_with_the_reports_keys(result: BenchResult) -> None:
    keys = [
        tuple(row[k] for k in ("backend", "draft", "gamma", "temperature", "batch")) for row in result.rows
    ]
    assert len(keys) == len(set(keys))
    # Per temperature: at batch 1 two baselines, native 1 + 2, assisted 1 + 2; at batch 2 nothing assisted.
    assert len(rows_where(result, batch=1)) == 2 * 8
    assert len(rows_where(result, batch=2)) == 2 * 5
    for row in result.rows:
        assert row.keys() >= REPORT_KEYS
    json.dumps(result.rows)


def test_acceptance_from_plain_text_is_what_greedy_speculation_then_shows(result: BenchResult) -> None:
    drafted = [row for row in rows_where(result, backend="native", temperature=0.0) if row["draft"] != "none"]
    assert len(drafted) == 2 * 3
    for row in drafted:
        assert row["acceptance_from_text"] == pytest.approx(row["acceptance_by_position"])
    assert 0 < rows_where(result, backend="native", temperature=1.0, draft="undistilled")[0]["acceptance_from_text"][0] < 1


def test_only_native_drafts_of_fixed_gamma_have_acceptance_from_text(result: BenchResult) -> None:
    for row in result.rows:
        assert ("acceptance_from_text" in row) == (row["backend"] == "native" and row["draft"] != "none")


def test_plain_decoding_commits_one_token_per_forward_and_the_target_as_draft_gamma_plus_one(
    result: BenchResult,
) -> None:
    for row in rows_where(result, draft="none"):
        assert row["block_efficiency"] == 1.0
    for row in rows_where(result, draft="distilled"):
        assert row["draft_acceptance_rate"] == 1.0
        assert row["block_efficiency"] > 1.4
    assert {row["draft_acceptance_rate"] for row in rows_where(result, draft="undistilled")} != {1.0}


def test_greedy_outputs_are_the_same_in_fp32(result: BenchResult) -> None:
    for row in rows_where(result, temperature=0.0):
        assert row["lossless"] is True
        assert row["num_identical"] == row["num_prompts"] == 3
        assert row["mismatches"] == []
        if row["backend"] == "native" and row["draft"] != "none":
            assert (
                row["num_checked"]
                == row["num_identical_same_width"]
                == row["num_plain_identical_across_widths"]
                == 2
            )


def test_speedups_are_against_the_strongest_baseline_of_the_same_setting(result: BenchResult) -> None:
    for temperature in (0.0, 1.0):
        for batch in (1, 2):
            rows = rows_where(result, temperature=temperature, batch=batch)
            best = max((r for r in rows if r["draft"] == "none"), key=lambda r: r["tokens_per_second"])
            assert best["walltime_speedup"] == best["predicted_speedup"] == 1.0
            for row in rows:
                assert row["baseline"] == best["backend"]
                assert row["walltime_speedup"] == pytest.approx(
                    row["tokens_per_second"] / best["tokens_per_second"]
                )
                assert row["low"] <= row["walltime_speedup"] <= row["high"]


def test_seconds_and_tokens_are_paired_by_group(result: BenchResult) -> None:
    for measurement in result.measurements:
        batch = measurement.condition.batch
        assert len(measurement.seconds) == len(measurement.num_tokens) == -(-3 // batch)
        lengths = [len(output.token_ids) for output in measurement.outputs]
        assert measurement.num_tokens == [sum(lengths[i : i + batch]) for i in range(0, 3, batch)]


class FakeBackend:
    """Takes a fixed time per token; notes the order of calls."""

    def __init__(self, name: str, calls: list[tuple[str, int]], tokens: Sequence[int] = (5, 6)) -> None:
        self.name, self.calls, self.tokens = name, calls, list(tokens)

    def generate(self, requests: Sequence[Request]) -> list[Output]:
        self.calls.append((self.name, requests[0].seed or 0))
        return [
            Output(
                list(self.tokens),
                "length",
                Stats(num_committed=2, num_prefills=1, num_rounds=1),
                token_times_s=[0.1, 0.2],
            )
            for _ in requests
        ]


def fake_factory(
    monkeypatch: pytest.MonkeyPatch, make_model: Callable[..., PreTrainedModel], calls: list[tuple[str, int]]
) -> BackendFactory:
    factory = BackendFactory(make_model(0), {}, DecoderConfig())
    monkeypatch.setattr(factory, "backend_of", lambda c: FakeBackend(f"{c.backend}{c.gamma}", calls))
    return factory


def test_conditions_alternate_and_warm_up_is_left_out(
    monkeypatch: pytest.MonkeyPatch, make_model: Callable[..., PreTrainedModel]
) -> None:
    calls: list[tuple[str, int]] = []
    config = BenchConfig(num_warmup_prompts=1, max_new_tokens=2, seed=10)
    conditions = [
        Condition("native", "none", 0, 0.0, 1),
        Condition("a", "d", 1, 0.0, 1),
        Condition("b", "d", 2, 0.0, 1),
    ]
    results = measure(fake_factory(monkeypatch, make_model, calls), conditions, [[1], [2], [3]], config)
    names = [name for name, _ in calls]
    assert names[:3] == ["native0", "a1", "b2"]
    assert names[3:] == ["native0", "a1", "b2", "native0", "b2", "a1", "b2", "native0", "a1"]
    assert [seed for _, seed in calls[3:]] == [10] * 3 + [11] * 3 + [12] * 3
    assert all(len(r.seconds) == 3 for r in results)


def test_a_deadline_stops_after_a_whole_group(
    monkeypatch: pytest.MonkeyPatch, make_model: Callable[..., PreTrainedModel]
) -> None:
    calls: list[tuple[str, int]] = []
    conditions = [Condition("native", "none", 0, 0.0, 1), Condition("a", "d", 1, 0.0, 1)]
    results = measure(
        fake_factory(monkeypatch, make_model, calls), conditions, [[1], [2], [3]], BenchConfig(num_warmup_prompts=0),
        deadline_s=time.perf_counter() - 1,
    )  # fmt: skip
    assert [len(r.seconds) for r in results] == [1, 1]


def measurement_of(
    condition: Condition, seconds: list[float], stats: list[Stats], num_tokens: int
) -> Measurement:
    outputs = [
        Output([1] * num_tokens, "length", s, token_times_s=np.linspace(0.1, 1, num_tokens).tolist())
        for s in stats
    ]
    return Measurement(condition, seconds=seconds, num_tokens=[num_tokens] * len(seconds), outputs=outputs)


def test_prediction_equals_the_clock_of_a_simulated_run() -> None:
    """Rounds of gamma 2 with known acceptance; the clock is made of the step times in the stats."""
    rng = np.random.default_rng(0)
    plain_stats, plain_s, spec_stats, spec_s = [], [], [], []
    num_tokens = 61
    for _ in range(40):
        plain_stats.append(
            Stats(
                num_committed=61, num_rounds=60, num_prefills=1, prefill_ms=20, verify_ms=600, overhead_ms=30
            )
        )
        plain_s.append(0.65)
        stats = Stats(num_committed=61, num_prefills=1)
        while stats.num_accepted + stats.num_rounds < 60:
            left = 60 - stats.num_accepted - stats.num_rounds
            num_accepted = min(int(rng.choice([0, 1, 2], p=[0.3, 0.2, 0.5])), left - 1)
            stats.add_round(num_proposed=min(2, left), num_accepted=num_accepted)
        stats.prefill_ms, stats.draft_ms = 25, 4 * stats.num_rounds
        stats.verify_ms, stats.overhead_ms = 12 * stats.num_rounds, 1 * stats.num_rounds
        spec_stats.append(stats)
        spec_s.append((25 + 17 * stats.num_rounds) / 1e3)
    plain = measurement_of(Condition("native", "none", 0, 0.0, 1), plain_s, plain_stats, num_tokens)
    spec = measurement_of(Condition("native", "distilled", 2, 0.0, 1), spec_s, spec_stats, num_tokens)
    row = bench_row(spec, plain, num_bootstrap=200, seed=0)
    assert row["walltime_speedup"] == pytest.approx(sum(plain_s) / sum(spec_s))
    assert row["predicted_speedup"] == pytest.approx(row["walltime_speedup"], rel=1e-6)
    assert row["low"] < row["walltime_speedup"] < row["high"]
    assert predict(plain, plain) == 1.0


def test_the_baseline_is_the_fastest_plain_decoding() -> None:
    stats = [Stats(num_committed=5, num_rounds=4, num_prefills=1, verify_ms=40.0)]
    slow = measurement_of(Condition("native", "none", 0, 0.0, 1), [2.0], stats, 5)
    fast = measurement_of(Condition("hf_generate", "none", 0, 0.0, 1), [1.0], stats, 5)
    drafted = measurement_of(Condition("native", "distilled", 1, 0.0, 1), [0.5], stats, 5)
    assert strongest_baseline([slow, drafted, fast]) is fast
    assert bench_row(slow, fast, num_bootstrap=10, seed=0)["walltime_speedup"] == 0.5


def test_token_latency_shares_a_blocks_gap_among_its_tokens() -> None:
    output = Output([1] * 6, "length", Stats(), token_times_s=[0.5, 0.6, 0.6, 0.9, 0.9, 0.9])
    assert list(token_latencies_ms(output)) == pytest.approx([50, 50, 100, 100, 100])
    assert list(token_latencies_ms(Output([1], "stop", Stats(), token_times_s=[0.5]))) == []


def test_prompts_keep_their_seed_in_every_condition_so_sampled_outputs_repeat(
    make_model: Callable[..., PreTrainedModel],
) -> None:
    target = make_model(0)
    config = BenchConfig(
        num_prompts=3, max_new_tokens=10, gammas=[2], temperatures=[1.0], batch_sizes=[1], backends=["native"],
        num_bootstrap=10, ignore_eos=True,
    )  # fmt: skip
    drafts = {"distilled": Draft(make_model(1, num_layers=1))}
    first, second = (run_bench(target, drafts, PROMPTS, config) for _ in range(2))
    for a, b in zip(first.measurements, second.measurements, strict=True):
        assert [o.token_ids for o in a.outputs] == [o.token_ids for o in b.outputs]


def test_a_lossy_rule_is_marked(make_model: Callable[..., PreTrainedModel]) -> None:
    config = BenchConfig(
        num_prompts=2, max_new_tokens=8, gammas=[2], temperatures=[1.0], backends=["native"], num_bootstrap=10
    )
    result = run_bench(
        make_model(0),
        {"distilled": Draft(make_model(1))},
        PROMPTS,
        config,
        runtime=DecoderConfig(acceptance="typical"),
    )
    assert [row["lossless"] for row in result.rows if row["draft"] == "distilled"] == [False]


def test_bf16_differences_are_explained(make_model: Callable[..., PreTrainedModel]) -> None:
    """vllm 41758, 54506: greedy differs between widths 1 and gamma+1 in bf16."""
    target = make_model(0, hidden_size=64, initializer_range=0.05).to(torch.bfloat16)
    config = BenchConfig(
        num_prompts=5, max_new_tokens=16, gammas=[3], temperatures=[0.0], backends=["native"], num_bootstrap=10,
        num_check_prompts=5, ignore_eos=True,
    )  # fmt: skip
    result = run_bench(target, {"distilled": Draft(make_model(1).to(torch.bfloat16))}, PROMPTS, config)
    (row,) = [row for row in result.rows if row["draft"] == "distilled"]
    assert row["lossless"] is True
    assert row["num_identical_same_width"] == 5
    assert row["num_identical"] == 5 - len(row["mismatches"])
    assert all(mismatch["is_near_tie"] for mismatch in row["mismatches"])


def test_conditions_follow_the_config() -> None:
    config = BenchConfig(gammas=[1, 4], undistilled_gammas=[1], backends=["native", "hf_assisted"])
    found = conditions_at(config, ["undistilled", "distilled"], temperature=0.0, batch=4)
    assert [(c.backend, c.draft, c.gamma) for c in found] == [
        ("native", "none", 0), ("native", "undistilled", 1), ("native", "distilled", 1), ("native", "distilled", 4),
    ]  # fmt: skip


def test_ngram_lookup_is_a_condition_without_a_draft(make_model: Callable[..., PreTrainedModel]) -> None:
    config = BenchConfig(
        num_prompts=3, max_new_tokens=24, gammas=[2], ngram_gammas=[4, 8], auto_gamma=True, temperatures=[0.0],
        num_bootstrap=10, ignore_eos=True,
    )  # fmt: skip
    rows = run_bench(make_model(0), {"distilled": Draft(make_model(1))}, PROMPTS, config).rows
    found = [row for row in rows if row["draft"] == "ngram"]
    assert [(row["gamma"], row["gamma_policy"]) for row in found] == [(4, "fixed"), (8, "fixed"), (8, "auto")]
    assert all(row["lossless"] and row["num_identical"] == 3 for row in found)
    assert all(row["backend"] == "native" and row["block_efficiency"] >= 1 for row in found)
    with pytest.raises(ValueError, match="ngram"):
        run_bench(make_model(0), {"ngram": Draft(make_model(1))}, PROMPTS, config)


def test_trees_and_heads_beside_chains(make_model: Callable[..., PreTrainedModel]) -> None:
    """Chains, trees, Medusa heads and n-grams on the same prompts; heads propose no more than there are of them."""
    config = BenchConfig(
        num_prompts=3, max_new_tokens=20, gammas=[2, 3], undistilled_gammas=[1], ngram_gammas=[4], num_bootstrap=10, ignore_eos=True,
        trees=["2x2", [-1, -1, 0], "chain3"], backends=["native", "hf_generate", "hf_assisted"], num_check_prompts=2,
    )  # fmt: skip
    target = make_model(0)
    drafts = {
        "undistilled": Draft(make_model(1)),
        "distilled": Draft(make_model(1, num_layers=1)),
        "medusa": Draft(heads_of_target(target, num_heads=2, num_layers=1)),
    }
    result = run_bench(target, drafts, PROMPTS, config)
    for temperature in (0.0, 1.0):
        found = [
            (row["draft"], row["gamma"], row["tree"])
            for row in rows_where(result, temperature=temperature, backend="native")
        ]
        assert found == [
            ("none", 0, None), ("undistilled", 1, None), ("distilled", 2, None), ("distilled", 3, None),
            ("distilled", 2, "2x2"), ("distilled", 2, (-1, -1, 0)), ("distilled", 3, "chain3"),
            ("medusa", 2, None), ("medusa", 2, "2x2"), ("medusa", 2, (-1, -1, 0)), ("ngram", 4, None),
        ]  # fmt: skip
    assert {row["draft"] for row in rows_where(result, backend="hf_assisted")} == {"undistilled", "distilled"}
    assert all(row["lossless"] for row in result.rows)
    for row in rows_where(result, backend="native"):
        assert ("acceptance_from_text" in row) == (row["draft"].endswith("distilled") and row["tree"] is None)
    for row in rows_where(result, temperature=0.0, draft="medusa"):
        assert row["num_identical"] == 3
        assert row["num_checked"] == row["num_identical_same_width"] == 2
    json.dumps(result.rows)


def test_memory_of_what_proposes(make_model: Callable[..., PreTrainedModel]) -> None:
    target, draft = make_model(0), make_model(1, num_layers=1)
    heads = heads_of_target(target, num_heads=2, num_layers=1)
    drafts = {"distilled": Draft(draft), "medusa": Draft(heads)}
    factory = BackendFactory(target, drafts, DecoderConfig())
    of_heads, of_draft = (Condition("native", name, 2, 0.0, 1) for name in ("medusa", "distilled"))
    for condition in (of_heads, of_draft):
        factory.backend_of(condition).generate([Request([3, 4], 4)])
    weights = [sum(x.numel() * 4 for x in model.parameters()) for model in (draft, heads)]
    num_buffers = sum(x.numel() * x.element_size() for x in heads.buffers())
    assert factory.draft_memory_mb(of_heads) == (weights[1] + num_buffers) / 2**20
    cached = factory.draft_memory_mb(of_draft) * 2**20 - weights[0]
    assert 0 < cached < 2**20
    assert factory.draft_memory_mb(Condition("native", "ngram", 4, 0.0, 1)) == 0
    assert factory.draft_memory_mb(Condition("hf_assisted", "distilled", 2, 0.0, 1)) is None


def test_heads_that_are_too_few_are_refused(make_model: Callable[..., PreTrainedModel]) -> None:
    drafts = {"medusa": Draft(heads_of_target(make_model(0), num_heads=1, num_layers=1))}
    with pytest.raises(ValueError, match=r"bench.gammas=\[2\], bench.trees=\['2x2'\]: the Medusa heads of draft 'medusa' are 1"):
        conditions_at(BenchConfig(gammas=[2], trees=["2x2"]), drafts, temperature=0.0, batch=1)


def test_no_chains_where_there_is_something_else() -> None:
    trees = conditions_at(
        BenchConfig(gammas=[], trees=["2x2"], backends=["native"]), ["distilled"], temperature=0.0, batch=2
    )
    assert [(c.draft, c.tree, c.width) for c in trees] == [("none", None, 1), ("distilled", "2x2", 7)]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"trees": ["bush3"]}, r"bench\.trees=\['bush3'\].*unknown"),
        ({"trees": [[0]]}, "node 0 has parent 0"),
        ({"trees": [3]}, r"bench\.trees=\[3\]"),
        ({"gammas": []}, r"bench\.gammas=\[\]"),
        ({"gammas": [], "trees": ["2x2"], "auto_gamma": True}, r"bench\.gammas=\[\]"),
        ({"trees": ["2x2"], "backends": ["hf_generate"]}, r"bench\.trees=\['2x2'\]: only the native engine"),
        ({"medusa_heads": "heads", "backends": ["hf_generate"]}, r"bench\.medusa_heads=heads: only the native engine"),
        ({"medusa_heads": "heads", "target": "random:tiny"}, "random weights have no trained heads"),
    ],
)
def test_wrong_trees_and_heads_are_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BenchConfig(**settings)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("backends", ["vlm"]), ("backends", ["hf_assisted"]), ("gammas", [0]), ("batch_sizes", []), ("temperatures", [-1.0]),
        ("num_prompts", 0), ("max_minutes", 0.0), ("undistilled_gammas", [0]), ("ngram_gammas", [0]), ("num_check_prompts", 0),
    ],
)  # fmt: skip
def test_bad_settings_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"bench\.{field}"):
        BenchConfig(**{field: value})  # type: ignore[arg-type]


def test_bad_input_is_refused(make_model: Callable[..., PreTrainedModel]) -> None:
    with pytest.raises(ValueError, match="no prompts"):
        run_bench(make_model(0), {}, [], BenchConfig())
    with pytest.raises(ValueError, match="none"):
        run_bench(make_model(0), {"none": Draft(make_model(1))}, PROMPTS, BenchConfig())
