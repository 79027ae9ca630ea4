"""The GPU check: tests marked gpu, the tiny pipeline, CUDA graphs against eager, and speedups at real shapes.

It needs torch and transformers; parts that need more are skipped and say what is missing. Each part is a
process with a time limit, all limits together stay under 8 minutes. Results: a table, and `gpu_check.json` in
the output folder. Exit codes: 0 when no part failed, 1 when one did, 2 without a CUDA device. `--device cpu`
tries the check itself, on tiny shapes.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from eval.config import BenchConfig
from eval.random_bench import build_model, random_prompts, run_random_bench
from eval.shapes import SHAPES
from specdec_runtime import DecoderConfig, Request, SpeculativeDecoder

ROOT = Path(__file__).resolve().parent.parent
PIPELINE_PACKAGES = ("hydra", "mlflow", "datasets", "trl", "gguf", "rich", "matplotlib", "psutil")
ACCEPTANCE, GAMMA = 0.7, 4
#: (target, draft, minutes at most) per device; the tiny ones only show that the check works.
SHAPE_PAIRS = {
    "cuda": (("llama3_8b", "draft_0_5b", 1.2), ("smollm2_135m", "draft_30m", 0.6)),
    "cpu": (("tiny", "tiny_draft", 0.2),),
}


@dataclass(frozen=True)
class Part:
    """A command with its time limit; `needs` are the packages without which it is skipped."""

    name: str
    command: list[str]
    limit_s: int
    needs: tuple[str, ...] = ()
    is_for_cuda: bool = False


def parts_of(device: str, output: Path) -> list[Part]:
    """What is run, in order."""
    python, this = sys.executable, [sys.executable, __file__, "--device", device, "--output", str(output)]
    # The project's own pytest settings ask for plugins that a bare machine lacks.
    pytest = [python, "-m", "pytest", "-q", "-m", "gpu", "-c", os.devnull, "--rootdir", str(ROOT)]
    pytest += ["-o", f"pythonpath={ROOT}", "-p", "no:cacheprovider", "--import-mode=importlib"]
    tests = ROOT / "tests" / "unit" / "runtime"
    pytest += ["--confcutdir", str(tests), str(tests)]
    pipeline = [
        python,
        "-m",
        "pipeline",
        "+experiment=tiny",
        "tracking=off",
        f"artifacts_dir={output / 'artifacts'}",
    ]
    return [
        Part("tests", pytest, 90, needs=("pytest",), is_for_cuda=True),
        Part("pipeline", pipeline, 120, needs=PIPELINE_PACKAGES),
        Part("graphs", [*this, "--part", "graphs"], 75),
        Part("shapes", [*this, "--part", "shapes"], 180),
    ]


def run_part(part: Part, device: str, output: Path) -> dict[str, Any]:
    """`status` (passed, failed, skipped), `reason` if not passed, `seconds`, and the part's own `rows`."""
    missing = [package for package in part.needs if find_spec(package) is None]
    if missing:
        return {"status": "skipped", "reason": f"not installed: {', '.join(missing)}"}
    if part.is_for_cuda and device != "cuda":
        return {"status": "skipped", "reason": "needs a CUDA device"}
    started = time.monotonic()
    log = output / f"{part.name}.log"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TOKENIZERS_PARALLELISM": "false"}
    with log.open("w", encoding="utf-8") as stream:
        try:
            code = subprocess.run(
                part.command,
                stdout=stream,
                stderr=subprocess.STDOUT,
                timeout=part.limit_s,
                cwd=output,
                env=environment,
                check=False,
            ).returncode
            reason = "" if code == 0 else f"exit code {code}, see {log}"
        except subprocess.TimeoutExpired:
            reason = f"not done after {part.limit_s} s, see {log}"
    result: dict[str, Any] = {"status": "failed" if reason else "passed", "reason": reason}
    result["seconds"] = round(time.monotonic() - started, 1)
    rows = output / f"{part.name}.json"
    return {**result, "rows": json.loads(rows.read_text(encoding="utf-8"))} if rows.is_file() else result


def check_graphs(device: str) -> list[dict[str, Any]]:
    """Decoding with and without CUDA graphs: equal tokens in fp32, tokens per second in bf16.

    Raises:
        ValueError: the tokens differ.
    """
    target, draft, _ = SHAPE_PAIRS[device][-1]
    rows = []
    for is_speculative in (False, True):
        tokens, speeds = {}, {}
        for graphs in (False, True):
            name = "graphs" if graphs else "eager"
            tokens[name], _ = _decode(target, draft, device, torch.float32, graphs, is_speculative)
            _, speeds[name] = _decode(target, draft, device, torch.bfloat16, graphs, is_speculative)
        what = f"{target}, gamma {GAMMA if is_speculative else 0}"
        if tokens["graphs"] != tokens["eager"]:
            raise ValueError(f"{what}: CUDA graphs change the tokens in fp32")
        speedup = speeds["graphs"] / speeds["eager"]
        figures = {f"tokens_per_second_{name}": speed for name, speed in speeds.items()}
        rows.append({"what": what, "is_same": True, **figures, "speedup": speedup})
    return rows


def _decode(
    target_name: str, draft_name: str, device: str, dtype: torch.dtype, graphs: bool, is_speculative: bool
) -> tuple[list[list[int]], float]:
    """Tokens and tokens per second of four prompts at temperature 0, after a round of warm-up."""
    config = BenchConfig(num_prompts=4, prompt_tokens=64, max_new_tokens=48)
    max_tokens = config.prompt_tokens + config.max_new_tokens + 1
    size: dict[str, Any] = {"dtype": dtype, "device": device, "max_tokens": max_tokens}
    vocab_size = SHAPES[target_name].vocab_size
    target = build_model(SHAPES[target_name], **size)
    draft = build_model(SHAPES[draft_name], seed=1, vocab_size=vocab_size, **size) if is_speculative else None
    # By the exact rule in fp32, where tokens are compared, and by chance in bf16, where only time counts.
    acceptance = "exact" if dtype == torch.float32 else "synthetic"
    settings = DecoderConfig(
        num_speculative_tokens=GAMMA if is_speculative else 0,
        acceptance=acceptance,
        synthetic_acceptance=ACCEPTANCE,
        min_conditional_acceptance=0.0,
        max_batch_size=config.num_prompts,
        cuda_graphs=graphs,
    )
    decoder = SpeculativeDecoder(target, draft, settings)
    prompts = random_prompts(config, vocab_size)
    requests = [Request(ids, config.max_new_tokens, ignore_eos=True, seed=i) for i, ids in enumerate(prompts)]
    decoder.generate(requests)
    started = time.perf_counter()
    outputs = decoder.generate(requests)
    seconds = time.perf_counter() - started
    return [output.token_ids for output in outputs], config.num_prompts * config.max_new_tokens / seconds


def time_shapes(device: str) -> list[dict[str, Any]]:
    """Bench rows of random weights at real shapes, with the shape's name in `what`."""
    rows = []
    for target, draft, max_minutes in SHAPE_PAIRS[device]:
        config = BenchConfig(
            target=f"random:{target}",
            draft=f"random:{draft}",
            acceptance=ACCEPTANCE,
            num_prompts=16 if device == "cuda" else 2,
            max_new_tokens=64 if device == "cuda" else 8,
            gammas=[2, GAMMA],
            auto_gamma=True,
            temperatures=[0.0],
            batch_sizes=[1, 16] if device == "cuda" else [1],
            max_minutes=max_minutes,
        )
        rows += [{"what": target, **row} for row in run_random_bench(config, device=device).rows]
        if device == "cuda":
            torch.cuda.empty_cache()
    return rows


def table_of(results: dict[str, dict[str, Any]]) -> str:
    """The results as text: one line per part, then the figures."""
    lines = [
        f"{name:<10}{r['status']:<9}{r.get('seconds', 0):>6} s  {r['reason']}" for name, r in results.items()
    ]
    for row in results.get("graphs", {}).get("rows", []):
        speeds = f"{row['tokens_per_second_eager']:.0f} tokens/s eager, {row['tokens_per_second_graphs']:.0f} with graphs"
        lines.append(f"graphs    {row['what']:<24}{speeds}: {row['speedup']:.2f}x, same tokens in fp32")
    for row in results.get("shapes", {}).get("rows", []):
        gamma = "auto" if row["gamma_policy"] == "auto" else row["gamma"]
        speed = f"{row['tokens_per_second']:.0f} tokens/s, {row['walltime_speedup']:.2f} [{row['low']:.2f}, {row['high']:.2f}]"
        mark = (
            f"  synthetic acceptance {row['synthetic_acceptance']:g}" if "synthetic_acceptance" in row else ""
        )
        lines.append(
            f"shapes    {row['what']:<14}{row['backend']:<13}gamma {gamma!s:<6}batch {row['batch']:<4}{speed}{mark}"
        )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Run all parts, or the one that `--part` names in this process; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--output", type=Path, default=Path("artifacts") / "gpu_check")
    parser.add_argument("--part", choices=("graphs", "shapes"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print(
            f"error: torch {torch.__version__} sees no CUDA device here; this check is for a machine with one "
            "(--device cpu tries the check itself on tiny shapes)",
            file=sys.stderr,
        )
        return 2
    output = options.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    if options.part is not None:
        rows = (check_graphs if options.part == "graphs" else time_shapes)(options.device)
        (output / f"{options.part}.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")
        return 0
    results = {}
    for part in parts_of(options.device, output):
        (output / f"{part.name}.json").unlink(missing_ok=True)
        print(f"{part.name}: at most {part.limit_s} s", flush=True)
        results[part.name] = run_part(part, options.device, output)
    name = torch.cuda.get_device_name(0) if options.device == "cuda" else "CPU"
    content = {"device": name, "torch": torch.__version__, "parts": results}
    (output / "gpu_check.json").write_text(json.dumps(content, indent=1), encoding="utf-8")
    print(f"\n{name}, torch {torch.__version__}\n{table_of(results)}\n{output / 'gpu_check.json'}")
    return int(any(result["status"] == "failed" for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
