"""Tokens per second of corpus generation against the bare engine, on the same prompts, one after the other.

python scripts/corpus_speed.py native --corpus artifacts/latest/corpus --rows 128   # naive: Transformers generate, batches of 8
.venv-vllm/bin/python scripts/corpus_speed.py vllm --corpus artifacts/latest/corpus --rows 128
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipeline.context import StageContext
from pipeline.corpus.answers import write_answers
from pipeline.corpus.backends import open_backend
from pipeline.corpus.backends.base import Options, common_prefix
from pipeline.corpus.chat import stop_ids
from pipeline.corpus.progress import CorpusProgress
from pipeline.corpus.read import read_corpus
from pipeline.corpus.rows import Row
from pipeline.corpus.target_info import load_target_info
from pipeline.models import resolve_target
from pipeline.schema import Config, CorpusConfig, TargetConfig
from pipeline.tracker import Tracker

NAIVE_BATCH = 8


def rows_of(folder: Path, num_rows: int, max_new_tokens: int) -> list[Row]:
    """The first prompts of a corpus, half of them greedy."""
    rows = read_corpus(folder).select_columns(["prompt_id", "prompt_token_ids", "seed"]).to_list()[:num_rows]
    return [
        Row(
            r["prompt_id"],
            "",
            "",
            tuple(r["prompt_token_ids"]),
            float(i % 2),
            1.0,
            r["seed"],
            0,
            max_new_tokens,
            "",
        )
        for i, r in enumerate(rows)
    ]


def naive(path: str, dtype: str, rows: list[Row]) -> int:
    """Transformers' generate on batches of 8, padded on the left; returns the number of new tokens."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
    num_tokens = 0
    for start in range(0, len(rows), NAIVE_BATCH):
        batch = rows[start : start + NAIVE_BATCH]
        encoded = tokenizer.pad(
            {"input_ids": [list(row.prompt_token_ids) for row in batch]}, return_tensors="pt"
        )
        with torch.inference_mode():
            out = model.generate(
                **encoded,
                max_new_tokens=batch[0].max_new_tokens,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
            )
        new = out[:, encoded["input_ids"].shape[1] :]
        ends = [(ids == model.config.eos_token_id).nonzero() for ids in new]
        num_tokens += sum(int(end[0]) + 1 if len(end) else new.shape[1] for end in ends)
    return num_tokens


def timed(name: str, work: Callable[[], int]) -> dict[str, Any]:
    started_s = time.perf_counter()
    num_tokens = work()
    seconds = time.perf_counter() - started_s
    figures = {
        "name": name,
        "num_tokens": num_tokens,
        "seconds": round(seconds, 2),
        "tokens_per_second": round(num_tokens / seconds, 1),
    }
    print(json.dumps(figures), flush=True)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("backend", choices=["native", "vllm", "openai"])
    parser.add_argument(
        "--corpus", type=Path, required=True, help="a finished corpus folder, whose prompts are taken"
    )
    parser.add_argument("--target", help="folder or Hugging Face id; default: the embedded target")
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--topk", type=int, default=64)
    parser.add_argument("--base-url", action="append", default=[])
    parser.add_argument("--artifacts-dir", default="artifacts")
    parser.add_argument("--naive", action="store_true", help="measure Transformers' generate too")
    arguments = parser.parse_args()
    corpus = CorpusConfig(
        backend=arguments.backend, base_urls=arguments.base_url, batch_size=arguments.batch_size, topk=arguments.topk,
        max_new_tokens=arguments.max_new_tokens, num_in_flight=arguments.batch_size,
    )  # fmt: skip
    config = Config(
        artifacts_dir=arguments.artifacts_dir, target=TargetConfig(path=arguments.target), corpus=corpus
    )
    target = resolve_target(config)
    rows = rows_of(arguments.corpus, arguments.rows, arguments.max_new_tokens)
    if arguments.naive:
        timed("naive", lambda: naive(target.path, config.target.dtype, rows))
    info = load_target_info(target.path, target.trust_remote_code)
    with tempfile.TemporaryDirectory() as folder:
        backend = open_backend(StageContext(config, Path(folder), {}, Tracker(), target), info)
        options = Options(
            stop_ids(info, AutoTokenizer.from_pretrained(target.path)), shared_prefix=common_prefix(rows)
        )

        def bare() -> int:
            return sum(len(one.token_ids) for one in backend.generate(iter(rows), options))

        def stage() -> int:
            with CorpusProgress() as progress:
                progress.start("answers", num_rows=len(rows), max_tokens_per_row=arguments.max_new_tokens)
                write_answers(
                    lambda: iter(rows), Path(folder) / "shards", backend=backend, shard_rows=64, progress=progress,
                    options=replace(options, topk=arguments.topk, on_tokens=progress.tokens),
                )  # fmt: skip
                return progress.num_tokens

        list(backend.generate(iter(rows[:2]), options))  # warm
        before = timed("engine", bare)
        after = timed(f"stage, topk={arguments.topk}", stage)
        backend.close()
    print(f"stage / engine: {after['tokens_per_second'] / before['tokens_per_second']:.3f}")


if __name__ == "__main__":
    main()
