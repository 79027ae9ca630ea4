"""Reading the report: headline figures, the choices made from them, the gate, and the printed tables."""

import json
from pathlib import Path

import pytest
from rich.console import Console

from pipeline.gate import gate_failures
from pipeline.report import (
    acceptance_table,
    bench_table,
    best_draft_sample_method,
    best_gamma,
    describe_machine,
    distilled_speedups,
    headline_acceptance,
    headline_speedup,
    read_acceptance,
    stage_minutes,
)
from pipeline.schema import GateConfig
from tests.unit.pipeline.report_samples import acceptance_row, bench_row, make_report


def test_headline_is_the_best_gamma_of_the_distilled_draft_at_the_lowest_temperature_and_batch() -> None:
    report = make_report(
        [
            bench_row("none", gamma=0, speedup=1.0),
            bench_row("undistilled", gamma=1, speedup=3.0),
            bench_row(gamma=1, speedup=1.2),
            bench_row(gamma=3, speedup=1.4),
            bench_row(gamma=2, speedup=2.0, batch=8),
            bench_row(gamma=2, speedup=2.5, temperature=1.0),
        ]
    )
    best = headline_speedup(report)
    assert best is not None
    assert (best["gamma"], best["walltime_speedup"]) == (3, 1.4)
    assert [row["gamma"] for row in distilled_speedups(report)] == [3, 1]
    assert best_gamma(report["bench"], default=9) == 3
    assert best_gamma([bench_row("none", gamma=0)], default=9) == 9
    assert headline_speedup(make_report([])) is None


def test_headline_acceptance_is_of_the_distilled_draft_at_the_lowest_temperature() -> None:
    rows = [
        acceptance_row(temperature=1.0, value=0.9),
        acceptance_row(value=0.5),
        acceptance_row("undistilled", value=0.1),
    ]
    found = headline_acceptance(make_report(acceptance=rows))
    assert found is not None
    assert found["value"] == 0.5
    assert headline_acceptance(make_report(acceptance=rows[2:])) is None


def test_sample_method_goes_by_measured_benefit_at_the_highest_temperature() -> None:
    """vllm 40149: the sampler that is served is the one whose acceptance counts."""

    def rows(probabilistic: float, greedy: float) -> list:
        hot = [("probabilistic", probabilistic), ("greedy", greedy)]
        decoys = [
            acceptance_row("undistilled", 1.0, "greedy", 0.99),
            acceptance_row("distilled", 0.5, "greedy", 0.98),
        ]
        return [*decoys, *(acceptance_row("distilled", 1.0, sampler, value) for sampler, value in hot)]

    assert best_draft_sample_method(rows(0.6, 0.5)) == "probabilistic"
    assert best_draft_sample_method(rows(0.5, 0.6)) == "greedy"
    assert best_draft_sample_method(rows(0.5, 0.5)) == "greedy"
    assert best_draft_sample_method([acceptance_row()]) == "greedy"


def test_gate_passes_and_names_each_failure() -> None:
    report = make_report()
    assert gate_failures(report, GateConfig(min_speedup=1.3, min_acceptance=0.6)) == []
    failures = gate_failures(report, GateConfig(min_speedup=1.31, min_acceptance=0.61))
    assert len(failures) == 2
    assert "gate.min_speedup=1.31: the best measured speedup is 1.300 (gamma 2" in failures[0]
    assert "gate.min_acceptance=0.61: the distilled draft's acceptance_rate is 0.600" in failures[1]


def test_gate_on_what_was_not_measured_fails() -> None:
    failures = gate_failures(
        make_report(bench=[], acceptance=[]), GateConfig(min_speedup=1.0, min_acceptance=0.1)
    )
    assert ["no speedup" in failures[0], "no acceptance" in failures[1]] == [True, True]
    assert gate_failures(make_report(bench=[], acceptance=[]), GateConfig()) == []


def test_gate_wants_lossless_output_unless_told_otherwise() -> None:
    report = make_report([bench_row(lossless=False), bench_row(gamma=4, temperature=1.0, lossless=None)])
    assert gate_failures(report, GateConfig()) == [
        "gate.require_lossless=true: the output differs from plain decoding's in 1 rows: native gamma 2 temperature 0"
    ]
    assert gate_failures(report, GateConfig(require_lossless=False)) == []


def test_a_sample_is_not_called_the_same_as_another() -> None:
    """At temperature 1 nothing was compared: the rule is exact, and the texts differ."""
    rows = [bench_row(), bench_row(temperature=1.0), bench_row(temperature=1.0, lossless=False), bench_row(lossless=None)]
    assert list(bench_table(rows).columns[-1].cells) == ["same", "exact rule", "DIFFERS", "-"]
    missing = bench_table([bench_row(latency_ms_p50=None, latency_ms_p99=None)])
    assert [list(column.cells) for column in missing.columns[9:11]] == [["-"], ["-"]]


def test_tables_show_every_row_with_its_interval() -> None:
    report = make_report([bench_row("none", gamma=0, speedup=1.0), bench_row(gamma=2, lossless=False)])
    console = Console(width=200, record=True)
    console.print(acceptance_table(report["acceptance_rate"]), bench_table(report["bench"]))
    text = console.export_text()
    assert "0.600 [0.580, 0.620]" in text
    assert "0.010 [-0.010, 0.030]" in text
    assert "1.30 [1.20, 1.40]" in text
    assert "DIFFERS" in text


def test_results_and_minutes_are_read_from_the_stage_folders(tmp_path: Path) -> None:
    folder = tmp_path / "eval" / "abc"
    folder.mkdir(parents=True)
    with pytest.raises(ValueError, match=r"acceptance\.json is missing: run the stage eval again"):
        read_acceptance(folder)
    (folder / "acceptance.json").write_text(
        json.dumps({"acceptance_rate": [acceptance_row()], "by_position": []})
    )
    (folder / "stage.json").write_text(json.dumps({"seconds": 90.0}))
    assert read_acceptance(folder) == [acceptance_row()]
    assert stage_minutes({"eval": folder, "corpus": tmp_path}) == {"eval": 1.5}


def test_machine_says_what_a_figure_needs() -> None:
    machine = describe_machine("bfloat16")
    assert machine["dtype"] == "bfloat16"
    assert machine["num_threads"] >= 1
    assert machine["processor"]
    assert set(machine["versions"]) == {"python", "torch", "transformers"}
