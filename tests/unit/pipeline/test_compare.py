"""Comparison of runs: from a real MLflow database to a table and a page, and what a run leaves there."""

import io
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import mlflow
import pytest
from mlflow import MlflowClient
from rich.console import Console

from pipeline.compare import main
from pipeline.compare_page import compare_page, figures_of
from pipeline.compare_table import compare_table, lines_of
from pipeline.summary import record_summary, summary_metrics, summary_tags
from pipeline.tracking import open_tracker
from pipeline.tracking_groups import open_group
from pipeline.tracking_read import read_runs
from pipeline.trials import Trial, plan_trials
from tests.conftest import Composer
from tests.unit.pipeline.report_samples import acceptance_row, bench_row
from tests.unit.pipeline.trial_results import finish_stage, write_trial


@pytest.fixture(scope="module")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Making the tables takes seconds: once for all tests."""
    file = tmp_path_factory.mktemp("database") / "mlflow.db"
    MlflowClient(f"sqlite:///{file}").search_experiments()
    return file


@pytest.fixture
def words(tmp_path: Path, empty_database: Path) -> Iterator[list[str]]:
    (tmp_path / "mlflow.db").write_bytes(empty_database.read_bytes())
    yield ["+experiment=tiny", f"tracking.uri=sqlite:///{tmp_path}/mlflow.db", f"artifacts_dir={tmp_path}/artifacts"]
    mlflow.set_tracking_uri(None)
    mlflow.set_registry_uri(None)


def finished_trial(words: list[str], *, acceptance: float, with_bench: bool = True) -> Trial:
    [trial] = plan_trials({"run": words})
    rows = [
        acceptance_row("undistilled", value=0.1),
        acceptance_row(value=acceptance),
        acceptance_row(temperature=1.0, value=acceptance - 0.1),
        acceptance_row(temperature=1.0, sampler="greedy", value=acceptance - 0.2),
    ]
    write_trial(trial, sums={(0.0, "probabilistic"): [1.0]}, counts=[2], acceptance={"acceptance_rate": rows})
    bench = [
        bench_row("none", gamma=0, speedup=1.0),
        bench_row(gamma=1, speedup=1.2, block_efficiency=1.4),
        bench_row(gamma=2, speedup=1.3, block_efficiency=1.7),
        bench_row(gamma=2, speedup=1.1, temperature=1.0),
    ]
    finish_stage(trial, "bench", {"bench.json": {"bench": bench}})
    return trial


def log_run(words: list[str], trial: Trial, *, curve: list[float]) -> None:
    with open_tracker(trial.config) as tracker:
        with tracker.stage("distill", "f" * 64):
            for step, value in enumerate(curve):
                tracker.log_metrics({"acceptance_rate": value}, step * 10)
        stages = ("corpus", "distill", "eval", "bench")
        record_summary(tracker, trial.config, {stage: trial.folders[stage] for stage in stages})


@pytest.fixture
def two_runs(words: list[str]) -> list[str]:
    for loss, acceptance in (("tv", 0.4), ("forward_kl", 0.5)):
        own = [*words, f"loss={loss}", f"tracking.run_name={loss} run"]
        log_run(own, finished_trial(own, acceptance=acceptance), curve=[0.1, acceptance])
    return words


def test_a_summary_has_stable_names(words: list[str]) -> None:
    trial = finished_trial(words, acceptance=0.5)
    metrics = summary_metrics(trial.folders)
    assert metrics == pytest.approx(
        {
            "num_corpus_tokens": 5000,
            "train_minutes": 1.0,
            "minutes": 4.0,
            "acceptance_rate_t0": 0.5,
            "acceptance_rate_t1": 0.4,
            "acceptance_rate_t1_greedy": 0.3,
            "walltime_speedup_t0": 1.3,
            "block_efficiency_t0": 1.7,
            "best_gamma_t0": 2,
            "walltime_speedup_t1": 1.1,
            "block_efficiency_t1": 1.9,
            "best_gamma_t1": 2,
        }
    )
    assert summary_metrics({"corpus": trial.folders["corpus"]}).keys() == {"num_corpus_tokens", "minutes"}


def test_a_draft_and_a_loss_are_described_in_a_word(make_config: Composer, tmp_path: Path) -> None:
    (tmp_path / "draft").mkdir()
    (tmp_path / "draft" / "config.json").write_text('{"num_hidden_layers": 2, "hidden_size": 64}')
    config = make_config("+experiment=tiny", "loss=tv", "draft.vocab_shortlist=100")
    assert summary_tags(config, {"distill": tmp_path}) == {
        "draft": "2 layers x 64, 100 ids",
        "loss": "tv, cached",
    }
    mixed = make_config("loss=mix", "loss.weights={tv: 0.9, cross_entropy: 0.1}")
    (tmp_path / "draft" / "medusa_config.json").write_text('{"num_heads": 3, "num_ids": 64, "vocab_size": 64}')
    assert summary_tags(config, {"distill": tmp_path})["draft"] == "3 Medusa heads, whole vocabulary"
    assert summary_tags(mixed, {})["loss"] == "0.9 tv + 0.1 cross_entropy, cached"


def test_the_table_shows_both_runs_newest_first(two_runs: list[str], make_config: Composer) -> None:
    runs = read_runs(make_config(*two_runs).tracking)
    assert [run.name for run in runs] == ["forward_kl run", "tv run"]
    assert runs[0].curve == [(0, 0.1), (10, 0.5)]
    lines = lines_of(runs)
    assert [line.changed for line in lines] == [
        {"loss.weights.forward_kl": "1.0", "loss.weights.tv": "-"},
        {"loss.weights.forward_kl": "-", "loss.weights.tv": "1.0"},
    ]
    shown = {key: value for key, value in lines[1].cells.items() if key not in ("started", "draft")}
    assert shown == {
        "run": "tv run",
        "loss": "tv, cached",
        "corpus tokens": "5,000",
        "alpha T=0": "0.400",
        "alpha T=1": "0.300",
        "tau T=0": "1.70",
        "speedup T=0": "1.30",
        "speedup T=1": "1.10",
        "train min": "1.0",
        "all min": "4.0",
    }
    printed = io.StringIO()
    Console(width=200, file=printed).print(compare_table(lines, title="runs"))
    assert {"0.400", "0.500"} <= set(re.findall(r"0\.\d{3}", printed.getvalue()))


def test_the_columns_are_visible_in_mlflow_itself(two_runs: list[str], make_config: Composer) -> None:
    settings = make_config(*two_runs).tracking
    client = MlflowClient(settings.uri)
    experiment = client.get_experiment_by_name("draftsmith")
    assert experiment is not None
    found = client.search_runs([experiment.experiment_id], "metrics.acceptance_rate_t0 > 0.45")
    assert [run.data.tags["loss"] for run in found] == ["forward_kl, cached"]


class Page(HTMLParser):
    """Text of the cells, and every place that the page refers to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.cells: list[str] = []
        self.places: list[str] = []
        self.best: list[str] = []
        self._open: str | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.places += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data")]
        self._open = (dict(attrs).get("class") or "") if tag == "td" else None

    def handle_data(self, data: str) -> None:
        if self._open is not None:
            self.cells.append(data)
            if "best" in self._open:
                self.best.append(data)
            self._open = None


def test_the_page_holds_the_table_and_asks_for_nothing(two_runs: list[str], make_config: Composer) -> None:
    lines = lines_of(read_runs(make_config(*two_runs).tracking))
    text = compare_page(lines, title="a & b")
    page = Page(text)
    for line in lines:
        assert [value for value in line.cells.values() if value not in page.cells] == []
    assert page.best == ["0.500", "0.400"], "alpha at both temperatures; the speeds are equal"
    assert len(page.places) == len(figures_of([line.run for line in lines])) == 4
    assert all(place.startswith("data:image/png;base64,iVBOR") for place in page.places)
    assert not re.search(r"https?:|url\(|@import|<script|<link", text)
    assert "<title>a &amp; b</title>" in text


def test_the_command_writes_the_page_and_takes_some_runs(
    two_runs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main([*two_runs, "compare.name=tv", f"compare.page={tmp_path}/here/page.html"])
    assert "tv run" in capsys.readouterr().out
    text = (tmp_path / "here" / "page.html").read_text()
    assert "tv run" in text
    assert "forward_kl run" not in text
    main([*two_runs, "compare.last=1"])
    assert "tv run" not in (tmp_path / "artifacts" / "compare.html").read_text()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["tracking.experiment=other"], "other: .* has only"),
        (["compare.name=nothing"], "compare.name=nothing"),
        (["compare.lsat=1"], "lsat"),
        (["tracking.uri=nonsense://x"], "tracking.uri=nonsense://x: cannot be read"),
    ],
)
def test_what_cannot_be_shown_is_said(two_runs: list[str], more: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        main([*two_runs, *more])


def test_a_group_is_one_run_that_goes_on_and_is_no_row(words: list[str], make_config: Composer) -> None:
    config = make_config(*words)
    with open_group(config, name="ablation losses", key="losses-1") as first:
        assert first is not None
        own = [*words, "tracking.run_name=tv", f"tracking.parent_run={first.parent_id}"]
        log_run(own, finished_trial(own, acceptance=0.4), curve=[])
    with pytest.raises(KeyboardInterrupt), open_group(config, name="ablation losses", key="losses-1") as second:
        assert second is not None
        assert second.parent_id == first.parent_id
        assert MlflowClient(config.tracking.uri).get_run(second.parent_id).info.status == "RUNNING"
        raise KeyboardInterrupt
    assert MlflowClient(config.tracking.uri).get_run(second.parent_id).info.status == "KILLED"
    with open_group(config, name="ablation losses", key="losses-2") as other:
        assert other is not None
        assert other.parent_id != first.parent_id
    [run] = read_runs(config.tracking)
    assert (run.name, run.group) == ("tv", "ablation losses")
    assert lines_of([run])[0].cells["run"] == "ablation losses / tv"


def test_without_tracking_a_group_is_nothing(make_config: Composer) -> None:
    with open_group(make_config("tracking=off"), name="a", key="b") as group:
        assert group is None


def test_on_a_fresh_clone_there_are_no_runs_and_nothing_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for uri in ("sqlite:///mlflow.db", f"sqlite:///{tmp_path}/deep/mlflow.db"):
        with pytest.raises(ValueError, match="no runs yet; `make distill` makes one"):
            main(["+experiment=tiny", f"tracking.uri={uri}"])
    assert not list(tmp_path.iterdir())


def test_a_name_in_brackets_is_no_markup(words: list[str], make_config: Composer) -> None:
    own = [*words, "tracking.run_name='[tv] b[/x]'"]
    log_run(own, finished_trial(own, acceptance=0.4), curve=[])
    printed = io.StringIO()
    lines = lines_of(read_runs(make_config(*words).tracking))
    Console(width=200, file=printed).print(compare_table(lines, title="[runs] of [/them]"))
    assert "[tv] b[/x]" in printed.getvalue() and "[runs] of [/them]" in printed.getvalue()
