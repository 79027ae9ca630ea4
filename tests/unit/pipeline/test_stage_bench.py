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
from pipeline.models import load_causal_lm, resolve_target
from pipeline.random_bench import run_shapes
from pipeline.report import bench_table, best_gamma, gamma_word
from pipeline.schema import Config, TrackingConfig
from pipeline.stage_bench import bench_figures, choose_prompts, run_bench
from pipeline.stages import STAGES, config_subtree, input_revisions
from pipeline.tracker import Tracker
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
