"""The command that holds greedy outputs against plain decoding: it passes on exact ones, and fails on others."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import specdec_runtime.judge as judge
from eval.config import BenchConfig, EvalConfig
from pipeline.check_lossless import check_lossless
from pipeline.models import load_causal_lm, resolve_target
from pipeline.schema import Config, TrackingConfig
from specdec_runtime.medusa_heads import heads_of_target
from specdec_runtime.verify import Verdict, verify_chain
from tests.unit.pipeline.corpus_samples import tiny_config
from tests.unit.pipeline.trained_samples import finish_stages

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    root = tmp_path_factory.mktemp("lossless")
    config = tiny_config(root / "artifacts", num_prompts=16)
    questions = root / "question.jsonl"
    questions.write_text("".join(json.dumps({"turns": [f"Question {i}?"]}) + "\n" for i in range(3)))
    config.bench = BenchConfig(
        prompts=str(questions),
        num_prompts=3,
        max_new_tokens=12,
        gammas=[1, 3],
        batch_sizes=[1, 2],
        ignore_eos=True,
    )
    config.eval = EvalConfig()
    config.tracking = TrackingConfig(enabled=False)
    finish_stages(config)
    return config


def written(config: Config, dtype: str) -> list[dict[str, object]]:
    path = Path(config.artifacts_dir) / "lossless" / f"{dtype}.json"
    return json.loads(path.read_text())["comparisons"]


def test_exact_outputs_pass_in_fp32_by_every_comparison(
    config: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    config.bench.dtype = "float32"
    assert check_lossless(config)
    comparisons = written(config, "float32")
    assert all(c["num_identical"] == c["num_outputs"] == 3 and c["must_be_identical"] for c in comparisons)
    speculative = {(c["batch"], c["gamma"], c["against"]) for c in comparisons if c["kind"] == "speculative"}
    against = ("plain at width 1", "hf_generate")
    assert speculative == {(batch, gamma, name) for batch in (1, 2) for gamma in (1, 3) for name in against}
    assert "3/3" in capsys.readouterr().out


def test_bf16_outputs_are_held_against_plain_decoding_at_the_same_width(config: Config) -> None:
    config.bench.dtype = "bfloat16"
    assert check_lossless(config)
    strict = [c for c in written(config, "bfloat16") if c["must_be_identical"]]
    assert {(c["batch"], c["gamma"], c["against"]) for c in strict} == {
        (1, 1, "plain at width 2"), (1, 3, "plain at width 4")
    }  # fmt: skip


def test_trees_heads_and_ngrams_are_checked_too(config: Config, tmp_path: Path) -> None:
    target = load_causal_lm(resolve_target(config).path, "float32")
    heads_of_target(target, num_heads=3, num_layers=1).save(tmp_path / "heads")
    bench = replace(
        config.bench, gammas=[], trees=["3x2", "2x1x1"], ngram_gammas=[4], batch_sizes=[2], medusa_heads=str(tmp_path / "heads")
    )
    for dtype in ("float32", "bfloat16"):
        assert check_lossless(replace(config, bench=replace(bench, dtype=dtype)))
        found = [c for c in written(config, dtype) if c["kind"] == "speculative" and c["against"] == "plain at width 1"]
        assert [(c["draft"], c["tree"], c["gamma"]) for c in found] == [
            ("distilled", "3x2", 2), ("distilled", "2x1x1", 3), ("medusa", "3x2", 2), ("medusa", "2x1x1", 3), ("ngram", None, 4),
        ]  # fmt: skip
        assert [c["what"] for c in found][3:] == ["medusa, tree 2x1x1, batch 2", "ngram, gamma 4, batch 2"]
        assert all(c["num_identical"] == 3 for c in found) or dtype == "bfloat16"
        assert not any(c["must_be_identical"] for c in found) or dtype == "float32"


def test_a_rule_that_accepts_too_much_is_found_out(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    def lax(**arguments: torch.Tensor) -> Verdict:
        verdict = verify_chain(**arguments)
        return Verdict(arguments["num_proposed_B"].to(verdict.num_accepted_B), verdict.next_ids_B)

    monkeypatch.setattr(judge, "verify_chain", lax)
    config.bench.dtype = "float32"
    assert not check_lossless(config)
    bad = [c for c in written(config, "float32") if c["kind"] == "speculative" and not c["is_lossless"]]
    assert bad and all(c["mismatches"] for c in bad)
