"""The bench stage on tiny models: prompts of a file, its own dtype, its files; and random shapes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure

from distill.draft_init import draft_from_layers
from eval.config import BenchConfig
from pipeline.context import StageContext
from pipeline.drafter_table import drafter_figures, drafter_table, has_drafters, short_way
from pipeline.models import load_causal_lm, resolve_target
from pipeline.random_bench import run_shapes
from pipeline.report import bench_table, best_gamma, gamma_word
from pipeline.schema import Config, TrackingConfig
from pipeline.stage_bench import bench_figures, choose_prompts, run_bench
from pipeline.stages import STAGES, config_subtree, input_revisions
from pipeline.tracker import Tracker
from specdec_runtime.medusa_heads import heads_of_target
from tests.conftest import Composer
from tests.unit.pipeline.corpus_samples import tiny_config
from tests.unit.pipeline.report_samples import bench_row

torch.set_num_threads(1)


class Figures(Tracker):
    """Keeps the names of logged figures."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def log_figure(self, figure: Figure, name: str) -> None:
        self.names.append(name)


def bench_config(**changes: Any) -> BenchConfig:
    settings: dict[str, Any] = {
        "num_prompts": 2, "max_new_tokens": 6, "gammas": [2], "auto_gamma": True, "temperatures": [0.0],
        "num_bootstrap": 10, "num_warmup_prompts": 0, **changes,
    }  # fmt: skip
    return BenchConfig(**settings)


@pytest.fixture
def make_context(tmp_path: Path) -> Callable[..., StageContext]:
    """`make_context(bench)`: a context with a tiny bfloat16 target, two drafts and a file."""
    prompts = tmp_path / "mt.jsonl"
    rows = [{"question_id": i, "category": "abc"[i % 3], "turns": [f"Question {i}?"]} for i in range(6)]
    prompts.write_text("\n".join(json.dumps(row) for row in rows))

    def make(**bench: Any) -> StageContext:
        config = tiny_config(tmp_path / "artifacts")
        config.target.dtype = "bfloat16"
        config.bench = bench_config(prompts=str(prompts), **bench)
        target = resolve_target(config)
        model, distill = load_causal_lm(target.path, "float32"), tmp_path / "distill"
        for name, layers in (("undistilled", [0]), ("draft", [0, 1, 2])):
            draft_from_layers(model, layers).save_pretrained(distill / name)
        (distill / "train.json").write_text('{"vocab_shortlist": null}')
        work_dir = tmp_path / "bench"
        work_dir.mkdir(exist_ok=True)
        return StageContext(config, work_dir, {"distill": distill}, Figures(), target)

    return make


def test_the_stage_measures_a_file_of_prompts_in_its_own_dtype(
    make_context: Callable[..., StageContext],
) -> None:
    context = make_context(dtype="float32", batch_sizes=[2])
    figures = run_bench(context)
    result = json.loads((context.work_dir / "bench.json").read_text())
    assert len(result["bench"]) == 2 + 2 * 2
    assert all(row["lossless"] is True for row in result["bench"])
    assert all(row["num_identical_hf_generate"] == 2 for row in result["bench"])
    settings = result["settings"]
    assert settings["machine"]["dtype"] == "float32"
    assert (settings["prompt_set"], settings["num_prompts"]) == ("mt.jsonl", 2)
    assert settings["prompt_categories"] == {"a": 1, "b": 1}
    assert context.tracker.names == ["speedup_t0.png"]  # type: ignore[attr-defined]
    assert figures.keys() == {
        f"walltime_speedup_{draft}_t0_g{gamma}_b2"
        for draft in ("undistilled", "distilled")
        for gamma in (2, "auto")
    }


def test_answers_of_one_token_and_no_draft_at_all_are_a_finished_benchmark(
    make_context: Callable[..., StageContext],
) -> None:
    """As where every prompt is answered by EOS at once: no round, no time between tokens, but rows of the table."""
    context = make_context(max_new_tokens=1, backends=["native"])
    run_bench(context)
    rows = json.loads((context.work_dir / "bench.json").read_text())["bench"]
    assert {row["block_efficiency"] for row in rows} == {1.0} and len(rows) == 5
    assert list(bench_table(rows).columns[9].cells) == ["-"] * 5
    context = make_context(backends=["hf_generate"])
    assert run_bench(context) == {}
    assert [row["draft"] for row in json.loads((context.work_dir / "bench.json").read_text())["bench"]] == ["none"]
    assert context.tracker.names == []  # type: ignore[attr-defined]


def test_prompts_leave_room_in_the_targets_context(make_context: Callable[..., StageContext]) -> None:
    context = make_context()
    target = load_causal_lm(context.target.path, "float32")
    lengths = [len(ids) for ids in choose_prompts(context, target).prompts]
    target.config.max_position_embeddings = lengths[0] + context.config.bench.max_new_tokens
    assert [len(ids) for ids in choose_prompts(context, target).prompts] == lengths
    target.config.max_position_embeddings -= 1
    with pytest.raises(ValueError, match="prompt_too_long"):
        choose_prompts(context, target)


def test_the_content_of_the_prompts_file_counts_and_not_its_place(
    make_context: Callable[..., StageContext],
) -> None:
    config, target = (context := make_context()).config, context.target
    (stage,) = (stage for stage in STAGES if stage.name == "bench")
    assert "bench.prompts" not in config_subtree(
        {"bench": {"prompts": "a", "seed": 0}, "runtime": {}}, stage.config_keys
    )
    before = input_revisions(config, target)["bench"]
    assert config.bench.prompts is not None
    Path(config.bench.prompts).write_text('{"turns": ["Other?"]}')
    assert input_revisions(config, target)["bench"] != before


def test_figures_are_named_by_draft_temperature_gamma_and_batch() -> None:
    rows = [
        {
            "backend": "native",
            "draft": "none",
            "temperature": 0.0,
            "gamma": 0,
            "gamma_policy": "fixed",
            "batch": 1,
        },
        {
            "backend": "native",
            "draft": "d",
            "temperature": 0.7,
            "gamma": 4,
            "gamma_policy": "fixed",
            "batch": 1,
        },
        {
            "backend": "native",
            "draft": "d",
            "temperature": 0.7,
            "gamma": 4,
            "gamma_policy": "auto",
            "batch": 1,
        },
        {
            "backend": "hf_assisted",
            "draft": "d",
            "temperature": 0.0,
            "gamma": 4,
            "gamma_policy": "fixed",
            "batch": 1,
        },
    ]
    figures = bench_figures([{**row, "walltime_speedup": i} for i, row in enumerate(rows)])
    assert figures == {"walltime_speedup_d_t0.7_g4_b1": 1, "walltime_speedup_d_t0.7_gauto_b1": 2}


def test_a_server_is_told_the_best_fixed_gamma_and_tables_name_the_automatic_one() -> None:
    rows = [bench_row(gamma=2, speedup=1.2), bench_row(gamma=5, speedup=1.9, gamma_policy="auto")]
    assert best_gamma(rows, default=9) == 2
    assert [gamma_word(row) for row in rows] == ["2", "auto, <= 5"]
    marked = bench_row(lossless=False, synthetic_acceptance=0.7)
    assert list(bench_table([*rows, marked]).columns[-1].cells) == ["same", "same", "synthetic"]


def test_trees_have_names_of_their_own_and_are_no_gamma_for_a_server() -> None:
    rows = [bench_row(gamma=2, speedup=1.2), bench_row(gamma=3, speedup=1.9, tree="3x2x1", gamma_policy="fixed")]
    uneven = bench_row(gamma=2, speedup=1.7, tree=[-1, -1, 0], gamma_policy="fixed")
    assert best_gamma([*rows, uneven], default=9) == 2
    assert [gamma_word(row) for row in (*rows, uneven)] == ["2", "tree 3x2x1", "tree 3nodes2deep"]
    assert [short_way(row) for row in (*rows, uneven)] == ["g2", "tree3x2x1", "tree3nodes2deep"]


def drafter_row(draft: str, speedup: float, memory_mb: float | None, **changes: Any) -> Any:
    times = {"draft_ms_per_round": 4.0, "verify_ms_per_round": 31.0, "overhead_ms_per_round": 1.5}
    return bench_row(draft, speedup=speedup, draft_memory_mb=memory_mb, **times, **changes)


def test_what_proposes_is_compared_with_what_it_costs() -> None:
    rows = [
        drafter_row("none", 1.0, 0.0, gamma=0), drafter_row("distilled", 1.3, 127.6), drafter_row("ngram", 1.1, 0.0, gamma=8),
        drafter_row("medusa", 1.2, 30.0, tree="2x1", block_efficiency=1.75),
        drafter_row("distilled", 0.8, None, backend="hf_assisted"),
    ]  # fmt: skip
    minutes = {"distilled": 14.0, "medusa": None}
    assert has_drafters(rows)
    assert not has_drafters([rows[0], rows[1]])
    columns = {str(column.header): list(column.cells) for column in drafter_table(rows, minutes).columns}
    assert columns["draft"] == ["none", "distilled", "ngram", "medusa"]
    assert columns["proposes"] == ["-", "2", "8", "tree 2x1"]
    assert columns["round ms"] == ["36.5"] * 4
    assert columns["draft MiB"] == ["0", "128", "0", "30"]
    assert columns["min"] == ["-", "14.0", "-", "-"]
    figures = drafter_figures(rows, minutes)
    assert figures["block_efficiency_medusa_t0_tree2x1_b1"] == 1.75
    assert figures["round_ms_ngram_t0_g8_b1"] == 36.5
    assert figures["draft_memory_mb_distilled_t0_g2_b1"] == 127.6
    assert figures["training_minutes_distilled"] == 14.0
    assert "training_minutes_medusa" not in figures


def test_heads_of_a_folder_are_measured_beside_the_draft(
    make_context: Callable[..., StageContext], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    context, folder = make_context(trees=["2x1"], dtype="float32", auto_gamma=False), tmp_path / "heads"
    model = load_causal_lm(context.target.path, "float32")
    heads_of_target(model, num_heads=2, num_layers=1).save(folder)
    (folder / "draftsmith.json").write_text('{"train": {"seconds": 90}}')
    context.config.bench.medusa_heads = str(folder)
    figures = run_bench(context)
    result = json.loads((context.work_dir / "bench.json").read_text())
    found = [(row["draft"], row["gamma"], row["tree"]) for row in result["bench"] if row["backend"] == "native"]
    chains_and_trees = [(draft, 2, tree) for draft in ("undistilled", "distilled", "medusa") for tree in (None, "2x1")]
    assert found == [("none", 0, None), *chains_and_trees]
    assert all(row["lossless"] for row in result["bench"])
    assert result["settings"]["training_minutes"] == {"distilled": None, "medusa": 1.5}
    assert figures["training_minutes_medusa"] == 1.5
    assert {"walltime_speedup_medusa_t0_tree2x1_b1", "round_ms_medusa_t0_tree2x1_b1"} <= figures.keys()
    assert "what proposes" in capsys.readouterr().out


def test_the_content_of_the_heads_counts_and_not_their_place(
    make_context: Callable[..., StageContext], tmp_path: Path
) -> None:
    context = make_context()
    config, model = context.config, load_causal_lm(context.target.path, "float32")
    without = input_revisions(config, context.target)["bench"]
    revisions = []
    for name, num_layers in (("one", 1), ("again", 1), ("other", 2)):
        heads_of_target(model, num_heads=1, num_layers=num_layers).save(tmp_path / name)
        config.bench.medusa_heads = str(tmp_path / name)
        revisions.append(input_revisions(config, context.target)["bench"])
    assert revisions[0] == revisions[1]
    assert len({without, *revisions}) == 3
    config.bench.medusa_heads = str(tmp_path)
    with pytest.raises(ValueError, match=r"bench.medusa_heads=.*no Medusa heads there"):
        input_revisions(config, context.target)


def random_config(tmp_path: Path, **changes: Any) -> Config:
    bench = bench_config(target="random:tiny", draft="random:tiny_draft", acceptance=0.5, prompt_tokens=4)
    return Config(
        stages=["bench"], artifacts_dir=str(tmp_path), bench=bench, tracking=TrackingConfig(enabled=False), **changes
    )  # fmt: skip


def test_random_shapes_need_no_other_stage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run_shapes(random_config(tmp_path))
    result = json.loads((folder / "bench.json").read_text())
    assert (result["settings"]["synthetic_acceptance"], result["settings"]["target"]) == (0.5, "random:tiny")
    drafted = [row for row in result["bench"] if row["draft"] == "tiny_draft"]
    assert [(row["synthetic_acceptance"], row["lossless"]) for row in drafted] == [(0.5, False)] * 2
    assert capsys.readouterr().out.count("synthetic") == 2
    assert run_shapes(random_config(tmp_path)) == folder


def test_random_shapes_with_other_stages_are_refused(tmp_path: Path) -> None:
    config = random_config(tmp_path)
    config.stages = ["corpus", "bench"]
    with pytest.raises(ValueError, match=r"bench\.target='random:tiny'.*stages=\[bench\]"):
        run_shapes(config)


def test_the_command_line_reaches_the_random_shapes(make_config: Composer) -> None:
    config = make_config("stages=[bench]", "bench.target=random:llama3_8b", "bench.acceptance=0.7")
    assert (config.bench.target, config.bench.draft) == ("random:llama3_8b", "random:draft_0_5b")
    with pytest.raises(Exception, match="write random:<shape>"):
        make_config("bench.target=llama3_8b")
