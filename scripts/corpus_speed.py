"""Tokens per second of corpus generation beside the bare engine's, on the same prompts, taken in turns.

In each round every variant answers all prompts once, and the next round takes them in the opposite order. Ratios are taken
within a round, so that what slows the machine for a while slows both sides; their intervals are Student's t over the rounds'
logarithms (95%).

    stage            the corpus stage's path: from rows to shards on disk, K candidates for each token
    stage, no topk   the same without candidates: what they cost
    engine           a plain loop over the engine, answers thrown away: `SpeculativeDecoder.generate`, `vllm.LLM.generate`,
                     or POST requests from as many threads
    engine, topk     that loop, asked for K candidates
    naive            (native) Transformers' `generate` in batches of 8, without candidates

    python scripts/corpus_speed.py native --corpus artifacts/latest/corpus
    .venv-vllm/bin/python scripts/corpus_speed.py vllm --corpus artifacts/latest/corpus
    python scripts/corpus_speed.py openai --corpus artifacts/latest/corpus --base-url http://localhost:8000/v1

Ends with 1 unless the intervals lie above what is asked: 0.9 of the engine that does the same work, with candidates and
without, and 1.5 times the naive loop.
"""

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from scipy.stats import t as student
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipeline.context import StageContext
from pipeline.corpus.answers import write_answers
from pipeline.corpus.backends import open_backend
from pipeline.corpus.backends.base import CorpusBackend, Options, common_prefix
from pipeline.corpus.backends.native import NativeCorpusBackend
from pipeline.corpus.backends.openai import OpenAICorpusBackend
from pipeline.corpus.backends.vllm import VllmCorpusBackend
from pipeline.corpus.chat import stop_ids
from pipeline.corpus.progress import CorpusProgress
from pipeline.corpus.read import read_corpus
from pipeline.corpus.rows import Row
from pipeline.corpus.target_info import load_target_info
from pipeline.corpus_schema import CorpusConfig
from pipeline.models import resolve_target
from pipeline.schema import Config, TargetConfig
from pipeline.tracker import Tracker
from specdec_runtime import DecoderConfig, Request, SpeculativeDecoder

NAIVE_BATCH = 8
#: The ratios that are shown, with what is asked of them.
RATIOS: list[tuple[str, str, float | None]] = [
    ("stage", "engine, topk", 0.9), ("stage, no topk", "engine", 0.9), ("stage", "engine", None),
    ("stage", "stage, no topk", None), ("engine, topk", "engine", None), ("stage", "naive", 1.5), ("stage, no topk", "naive", None),
]  # fmt: skip
Work = Callable[[], int]


def rows_of(folder: Path, num_rows: int, max_new_tokens: int) -> list[Row]:
    """The first prompts of a corpus, every second one greedy."""
    rows = read_corpus(folder).select_columns(["prompt_id", "prompt_token_ids", "seed"]).to_list()[:num_rows]
    return [
        Row(r["prompt_id"], "", "", tuple(r["prompt_token_ids"]), float(i % 2), 1.0, r["seed"], 0, max_new_tokens, "")
        for i, r in enumerate(rows)
    ]  # fmt: skip


def stage(backend: CorpusBackend, rows: Sequence[Row], options: Options) -> int:
    """What the corpus stage does with its rows; returns the number of new tokens."""
    with tempfile.TemporaryDirectory() as folder, CorpusProgress() as progress:
        progress.start("answers", num_rows=None, max_tokens_per_row=rows[0].max_new_tokens)
        write_answers(
            lambda: iter(rows), Path(folder) / "shards", backend=backend, shard_rows=64, progress=progress,
            options=replace(options, on_tokens=progress.tokens),
        )  # fmt: skip
        return progress.num_tokens


def bare(backend: CorpusBackend, rows: Sequence[Row], options: Options) -> Work:
    """The engine without the stage: what somebody would write who throws the answers away."""
    if isinstance(backend, NativeCorpusBackend):
        model, decoding = backend.model, DecoderConfig(num_speculative_tokens=0, max_batch_size=backend.batch_size)
        decoder = SpeculativeDecoder(model, None, decoding)
        requests = [_request(row, options) for row in rows]
        return lambda: sum(len(output.token_ids) for output in decoder.generate(requests))
    if isinstance(backend, VllmCorpusBackend):
        return _bare_vllm(backend, rows, options)
    assert isinstance(backend, OpenAICorpusBackend)
    client, bodies = backend.servers, [backend.body(row, options) for row in rows]

    def post(body: dict[str, Any]) -> int:
        return len(client.post("/completions", body, body)["choices"][0]["token_ids"])

    def post_all() -> int:
        with ThreadPoolExecutor(backend.num_in_flight) as pool:
            return sum(pool.map(post, bodies))

    return post_all


def _request(row: Row, options: Options) -> Request:
    return Request(
        prompt_token_ids=row.prompt_token_ids, max_new_tokens=row.max_new_tokens, temperature=row.temperature, seed=row.seed,
        stop_token_ids=sorted(options.stop_token_ids), ignore_eos=True, logprobs=options.topk or None,
    )  # fmt: skip


def _bare_vllm(backend: VllmCorpusBackend, rows: Sequence[Row], options: Options) -> Work:
    import vllm

    prompts = [{"prompt_token_ids": list(row.prompt_token_ids)} for row in rows]
    sampling = [
        vllm.SamplingParams(
            max_tokens=row.max_new_tokens, temperature=row.temperature, seed=row.seed, detokenize=False, ignore_eos=True,
            stop_token_ids=sorted(options.stop_token_ids), logprobs=options.topk or None, flat_logprobs=bool(options.topk),
        )
        for row in rows
    ]  # fmt: skip

    def generate() -> int:
        outputs = backend.llm.generate(prompts, sampling, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return generate


def naive(path: str, dtype: str, rows: Sequence[Row], options: Options) -> Work:
    """Transformers' `generate` on batches of 8, padded on the left, greedy and sampled rows apart."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
    ends = torch.tensor(sorted(options.stop_token_ids))
    batches = [
        same[start : start + NAIVE_BATCH]
        for same in ([r for r in rows if r.temperature == 0], [r for r in rows if r.temperature > 0])
        for start in range(0, len(same), NAIVE_BATCH)
    ]

    @torch.inference_mode()
    def answer(batch: Sequence[Row]) -> int:
        encoded = tokenizer.pad({"input_ids": [list(row.prompt_token_ids) for row in batch]}, return_tensors="pt")
        sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0} if batch[0].temperature else {"do_sample": False}
        out = model.generate(**encoded, max_new_tokens=batch[0].max_new_tokens, eos_token_id=ends.tolist(), **sampling)
        places = [torch.isin(ids, ends).nonzero() for ids in out[:, encoded["input_ids"].shape[1] :]]
        width = out.shape[1] - encoded["input_ids"].shape[1]
        return sum(int(place[0]) + 1 if len(place) else width for place in places)

    return lambda: sum(map(answer, batches))


def measure(variants: dict[str, Work], *, num_rounds: int, before: Callable[[], object]) -> dict[str, list[float]]:
    """Tokens per second of each variant in each round, after one round that is not counted. `before` comes before each."""
    speeds: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(num_rounds + 1):
        for name in list(variants) if number % 2 else list(variants)[::-1]:
            before()
            started_s = time.perf_counter()
            num_tokens = variants[name]()
            seconds = time.perf_counter() - started_s
            if number:
                speeds[name].append(num_tokens / seconds)
            note = "" if number else " (warm-up)"
            print(f"round {number}{note}: {name:<15} {num_tokens} tokens in {seconds:.2f} s", file=sys.stderr, flush=True)
    return speeds


def paired_ratio(numerators: Sequence[float], divisors: Sequence[float]) -> tuple[float, float, float]:
    """Geometric mean of the rounds' ratios, and its 95% interval; infinitely wide for one round."""
    logs = [math.log(a / b) for a, b in zip(numerators, divisors, strict=True)]
    mean, half = statistics.fmean(logs), math.inf
    if len(logs) > 1:
        half = float(student.ppf(0.975, len(logs) - 1)) * statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


def report(speeds: dict[str, list[float]], path: Path | None) -> bool:
    """Print the figures, write them where asked, and say whether the stage reaches what it has to."""
    for name, values in speeds.items():
        print(f"{name:<15} {statistics.median(values):8.1f} tokens/s")
    ratios, is_good = {}, True
    for one, other, required in RATIOS:
        if one not in speeds or other not in speeds:
            continue
        value, low, high = ratios[f"{one} / {other}"] = paired_ratio(speeds[one], speeds[other])
        verdict = "" if required is None else f"; {required} asked: {'reached' if low >= required else 'NOT SHOWN'}"
        is_good &= required is None or low >= required
        print(f"{one} / {other}: {value:.3f} ({low:.3f} to {high:.3f}){verdict}")
    cost = 1 - paired_ratio(speeds["stage"], speeds["stage, no topk"])[0]
    print(f"the candidates take {cost:.1%} of the stage's speed")
    if path is not None:
        path.write_text(json.dumps({"tokens_per_second": speeds, "ratios": ratios}, indent=2) + "\n")
    return is_good


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backend", choices=["native", "vllm", "openai"])
    parser.add_argument("--corpus", type=Path, required=True, help="a finished corpus folder, whose prompts are taken")
    parser.add_argument("--target", help="folder or Hugging Face id; default: the embedded target")
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--topk", type=int, default=64)
    parser.add_argument("--base-url", action="append", default=[])
    parser.add_argument("--artifacts-dir", default="artifacts")
    parser.add_argument("--json", type=Path, help="write the figures here")
    return parser.parse_args()


def main() -> int:
    """Measure; returns the exit status."""
    arguments = parse()
    corpus = CorpusConfig(
        backend=arguments.backend, base_urls=arguments.base_url, batch_size=arguments.batch_size, topk=arguments.topk,
        max_new_tokens=arguments.max_new_tokens, num_in_flight=arguments.batch_size,
    )  # fmt: skip
    config = Config(artifacts_dir=arguments.artifacts_dir, target=TargetConfig(path=arguments.target), corpus=corpus)
    target = resolve_target(config)
    rows = rows_of(arguments.corpus, arguments.rows, arguments.max_new_tokens)
    info = load_target_info(target.path, target.trust_remote_code)
    backend = open_backend(StageContext(config, Path("unused"), {}, Tracker(), target), info)
    without = Options(stop_ids(info, AutoTokenizer.from_pretrained(target.path)), shared_prefix=common_prefix(rows))
    with_topk = replace(without, topk=arguments.topk)
    variants: dict[str, Work] = {
        "stage": lambda: stage(backend, rows, with_topk),
        "engine, topk": bare(backend, rows, with_topk),
        "engine": bare(backend, rows, without),
        "stage, no topk": lambda: stage(backend, rows, without),
    }
    if arguments.backend == "native":
        variants["naive"] = naive(target.path, config.target.dtype, rows, without)
    # Otherwise whoever comes later would find the prompts' keys and values.
    forget = backend.llm.reset_prefix_cache if isinstance(backend, VllmCorpusBackend) else int
    try:
        speeds = measure(variants, num_rounds=arguments.rounds, before=forget)
    finally:
        backend.close()
    return 0 if report(speeds, arguments.json) else 1


if __name__ == "__main__":
    sys.exit(main())
