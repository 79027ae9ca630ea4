"""The comparison with trl does the same work on both sides; the size of the cache is that of its files."""

import argparse
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from distill.draft_init import draft_from_layers
from pipeline.corpus.shards import ANSWER_SCHEMA, ShardFolder
from pipeline.models import load_causal_lm
from pipeline.random_target import obtain_random_target
from pipeline.schema import RandomModelConfig
from tests.conftest import ROOT

NUM_CACHED = 320  # the whole vocabulary, so that the cached loss equals the live one up to fp16


def load_script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A random target, a draft of two of its layers, and a corpus of 12 rows with all of the target's log-probabilities."""
    import torch

    root = tmp_path_factory.mktemp("compare")
    target_dir = obtain_random_target(RandomModelConfig(), root / "models")
    target = load_causal_lm(str(target_dir), "float32")
    draft_from_layers(target, [0, 1]).save_pretrained(root / "draft")
    random = np.random.default_rng(0)
    rows = []
    for index in range(12):
        prompt, answer = random.integers(5, 300, 6).tolist(), random.integers(5, 300, 5 + index).tolist()
        with torch.no_grad():
            logits = target(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].float()
        top = torch.log_softmax(logits, -1).topk(NUM_CACHED)
        values = {
            "prompt_id": str(index), "source": "test", "domain": "test", "prompt_token_ids": prompt, "response_token_ids": answer,
            "finish_reason": "length", "temperature": 1.0, "top_p": 1.0, "seed": 0, "topk_ids": top.indices.tolist(),
            "topk_logprobs": top.values.half().numpy().tolist(),
        }  # fmt: skip
        rows.append({name: values[name] for name in ANSWER_SCHEMA.names})
    shards = ShardFolder(root / "corpus" / "shards", ANSWER_SCHEMA)
    shards.write(0, rows[:8])
    shards.write(1, rows[8:])
    return {"target": target_dir, "draft": root / "draft", "corpus": root / "corpus", "scratch": root / "scratch"}


@pytest.mark.parametrize("embeddings", ["trained", "frozen"])
def test_both_sides_train_on_the_same_tokens_with_the_same_loss(folders: dict[str, Path], embeddings: str) -> None:
    script = load_script("compare_trl")
    common = argparse.Namespace(
        embeddings=embeddings, rows_per_step=3, steps=2, head_chunk_tokens=16, checkpointing=False, **folders,
        rows=folders["scratch"] / f"rows-{embeddings}",
    )  # fmt: skip
    script.save_rows(common)
    figures = {}
    for variant in script.VARIANTS:
        figures[variant] = script.measure(argparse.Namespace(**{**vars(common), "variant": variant}))
    assert {row["num_supervised_tokens"] for row in figures.values()} == {sum(5 + index for index in range(12))}
    for variant in ("cached", "online"):
        # bf16 autocast rounds differently on padded and on packed rows.
        assert figures[variant]["first_loss"] == pytest.approx(figures["trl"]["first_loss"], rel=2e-2)
    assert all(row["tokens_per_second"] > 0 and row["peak_mib"] > 100 for row in figures.values())


def test_ratios_are_paired_and_shown(folders: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    script = load_script("compare_trl")
    runs = [
        {"variant": name, "embeddings": "frozen", "tokens_per_second": speed, "peak_mib": mib, "imports_mib": 100.0, "first_loss": 1.0}
        for name, speed, mib in (
            ("trl", 10.0, 300.0), ("cached", 40.0, 200.0), ("online", 20.0, 300.0),
            ("online", 30.0, 300.0), ("cached", 40.0, 200.0), ("trl", 20.0, 300.0),
        )
    ]  # fmt: skip
    table = {row["variant"]: row for row in script.summarise(runs, "frozen")}
    assert table["cached"]["tokens_per_second"] == 40.0
    assert table["cached"]["tokens_per_second_ratio"]["value"] == pytest.approx((4 + 2) / 2)
    assert table["online"]["tokens_per_second_ratio"]["value"] == pytest.approx((2 + 1.5) / 2)
    assert table["cached"]["training_mib_ratio"]["value"] == pytest.approx(0.5)
    assert script.summarise(runs, "trained") == []
    script.show(list(table.values()))
    assert "3.00 (2.00 to 4.00)" in capsys.readouterr().out


def test_a_missing_corpus_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert load_script("compare_trl").main(["--corpus", str(tmp_path / "none")]) == 2
    assert "none: no such folder" in capsys.readouterr().err


def test_cache_size_counts_the_columns_of_all_shards(folders: dict[str, Path]) -> None:
    size = load_script("topk_cache_size").cache_size(folders["corpus"])
    files = sorted((folders["corpus"] / "shards").glob("*.parquet"))
    num_tokens = sum(5 + index for index in range(12))
    assert (size["k"], size["num_response_tokens"]) == (NUM_CACHED, num_tokens)
    assert size["bytes_per_token_uncompressed"] == 6 * NUM_CACHED
    # All columns together are the file without its header and its metadata.
    stored = size["bytes_per_token"] * num_tokens / size["share_of_corpus"]
    overhead = sum(file.stat().st_size for file in files) - stored
    assert 0 < overhead < 12_000
    assert size["share_of_corpus"] > 0.9


def test_a_corpus_without_top_k_is_refused(tmp_path: Path) -> None:
    script = load_script("topk_cache_size")
    with pytest.raises(ValueError, match="holds no shards"):
        script.cache_size(tmp_path)
    (tmp_path / "shards").mkdir()
    table = pa.table({"response_token_ids": [[1, 2]], "topk_ids": pa.array([[[], []]], pa.list_(pa.list_(pa.int32())))})
    pq.write_table(table, tmp_path / "shards" / "0.parquet")
    with pytest.raises(ValueError, match="corpus.topk=0"):
        script.cache_size(tmp_path)
