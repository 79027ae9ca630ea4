"""`vllm bench serve` with and without the exported draft, at several loads: `make bench-serving`, or

    python -m pipeline.bench_serving [--artifacts FOLDER] [--rates 0.5 1 2] [--concurrency 1 8] ...

One server at a time, or both with --side-by-side, each load first without the draft and then with it: where two fit into
memory, a machine that is slower for a while then slows both. Every load point asks the same held-out prompts and is preceded
by a warm-up. What is measured is written to `<artifacts>/serving/bench_serving.json` as soon as it is there.
"""

import argparse
import json
import subprocess
import tempfile
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from pipeline.bench_serving_rows import Load, row_of, table
from pipeline.commands import run_command
from pipeline.models import load_tokenizer
from pipeline.report import describe_machine
from pipeline.serving_inputs import ServedPair, add_pair_arguments, held_out_prompts, read_pair
from pipeline.store import write_json
from pipeline.vllm_server import VLLMServer, vllm_command

NUM_WARMUPS = 2


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m pipeline.bench_serving", description="vLLM with and without the exported draft."
    )
    add_pair_arguments(parser)
    parser.add_argument("--rates", type=float, nargs="*", default=[0.5, 1.0, 2.0], help="requests per second")
    parser.add_argument(
        "--concurrency", type=int, nargs="*", default=[1, 8], help="requests under way at once"
    )
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--num-prompts", type=int, default=32, help="requests per load point")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--max-length", type=int, default=1024, help="prompt and answer together, in tokens")
    parser.add_argument(
        "--side-by-side", action="store_true", help="run both servers at once and take turns at each load"
    )
    parser.add_argument(
        "--serve", nargs=argparse.REMAINDER, default=[], help="further words for `vllm serve`, last"
    )
    arguments = parser.parse_args(words)
    if not arguments.rates and not arguments.concurrency:
        parser.error("--rates and --concurrency are both empty: give at least one load")
    return arguments


def run(arguments: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """All load points of both servers; rows as in `row_of`. Writes them and the servers' logs into `folder`."""
    pair = read_pair(arguments.artifacts, target=arguments.target).with_settings(
        gamma=arguments.gamma, sampler=arguments.sampler, dtype=arguments.dtype
    )
    max_tokens = arguments.max_length - arguments.max_new_tokens
    prompts = held_out_prompts(arguments.artifacts, arguments.num_prompts, max_tokens=max_tokens)
    tokenizer = load_tokenizer(pair.target) if Path(pair.target).is_dir() else load_tokenizer(str(pair.draft))
    loads = [Load(rate=r) for r in arguments.rates] + [Load(concurrency=c) for c in arguments.concurrency]
    folder.mkdir(parents=True, exist_ok=True)
    settings = {
        "machine": describe_machine(pair.dtype),
        "pair": {**asdict(pair), "draft": str(pair.draft), "report": None},
        "num_prompts": arguments.num_prompts,
        "num_distinct_prompts": len(prompts),
        "max_new_tokens": arguments.max_new_tokens,
        "side_by_side": arguments.side_by_side,
        "serve": arguments.serve,
    }
    rows: list[dict[str, Any]] = []
    measured = points(pair, arguments, folder, loads)
    with tempfile.TemporaryDirectory() as scratch, closing(measured):  # an error here ends the servers, too
        texts = Path(scratch) / "prompts.jsonl"
        texts.write_text("".join(json.dumps({"prompt": tokenizer.decode(ids)}) + "\n" for ids in prompts))
        for draft, server, temperature, load in measured:
            result = bench(server, pair.target, load, temperature, arguments, texts, Path(scratch))
            rows.append(row_of(result, draft=draft, load=load, temperature=temperature))
            write_json(folder / "bench_serving.json", {"settings": settings, "rows": rows})
            print(
                f"{draft}, temperature {temperature:g}, {load.name}: "
                f"{rows[-1]['output_tokens_per_second']:.1f} tokens/s",
                flush=True,
            )
    return rows


def points(
    pair: ServedPair, arguments: argparse.Namespace, folder: Path, loads: Sequence[Load]
) -> Generator[tuple[str, VLLMServer, float, Load], None, None]:
    """Which draft, on which running server, at which temperature and load: what is to be measured, in order."""
    grid = [(temperature, load) for temperature in arguments.temperatures for load in loads]
    if arguments.side_by_side:
        with ExitStack() as stack:
            running = [
                (draft, stack.enter_context(server)) for draft, server in servers(pair, arguments, folder)
            ]
            for temperature, load in grid:
                for draft, server in running:
                    yield draft, server, temperature, load
        return
    for draft, server in servers(pair, arguments, folder):
        with server:
            for temperature, load in grid:
                yield draft, server, temperature, load


def servers(
    pair: ServedPair, arguments: argparse.Namespace, folder: Path
) -> Iterator[tuple[str, VLLMServer]]:
    """The plain server, then the one with the draft; not started yet."""
    words = [
        "--dtype",
        pair.dtype,
        "--max-model-len",
        str(arguments.max_length),
        "--no-enable-prefix-caching",
    ]
    words += arguments.serve
    yield "none", VLLMServer(pair.target, log=folder / "serve_plain.log", arguments=words)
    yield (
        "distilled",
        VLLMServer(
            pair.target,
            log=folder / "serve_draft.log",
            arguments=words,
            speculative_config=pair.speculative_config(),
        ),
    )


def bench(
    server: VLLMServer,
    target: str,
    load: Load,
    temperature: float,
    arguments: argparse.Namespace,
    prompts: Path,
    scratch: Path,
) -> dict[str, Any]:
    """One run of `vllm bench serve`; its own result file.

    Raises:
        RuntimeError: it failed, or requests did; with the end of its output.
    """
    command = [
        vllm_command(), "bench", "serve", "--backend", "openai", "--endpoint", "/v1/completions",
        "--base-url", server.base_url, "--model", target, "--served-model-name", server.model_name,
        "--dataset-name", "custom", "--dataset-path", str(prompts), "--skip-chat-template",
        "--num-prompts", str(arguments.num_prompts), "--num-warmups", str(NUM_WARMUPS), "--disable-tqdm",
        "--custom-output-len", str(arguments.max_new_tokens), "--temperature", str(temperature),
        # The prompts' texts hold their special tokens already.
        "--extra-body", '{"add_special_tokens": false}', "--seed", "0",
        "--percentile-metrics", "ttft,tpot,e2el", "--metric-percentiles", "50,99",
        "--save-result", "--result-dir", str(scratch), "--result-filename", "result.json", *load.words(),
    ]  # fmt: skip
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    path = scratch / "result.json"
    if done.returncode or not path.is_file():
        raise RuntimeError(f"{' '.join(command)} failed:\n" + "\n".join(done.stdout.splitlines()[-20:]))
    result: dict[str, Any] = json.loads(path.read_text())
    path.unlink()
    if result["failed"]:
        raise RuntimeError(f"{result['failed']} of {arguments.num_prompts} requests failed; see {server.log}")
    return result


def main(words: Sequence[str]) -> None:
    """The command.

    Raises:
        ValueError: vLLM or the export is missing, a wrong setting.
    """
    arguments = parse_arguments(words)
    folder = arguments.artifacts / "serving"
    rows = run(arguments, folder)
    console = Console(highlight=False)
    (console if console.is_terminal else Console(highlight=False, width=140)).print(table(rows))
    print(f"written to {folder / 'bench_serving.json'}")


if __name__ == "__main__":
    run_command(main)
