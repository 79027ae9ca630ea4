"""llama.cpp with and without the draft: same greedy text? how much is accepted? how fast? Needs the package xllamacpp only.

    python scripts/llama_cpp_compare.py artifacts/gguf [--type q8_0] [--gamma N] [--num-prompts 8] [--max-tokens 64] [--passes 2]

Runs llama.cpp's server code in this process, on the CPU, one request at a time; each prompt is answered plainly and with the
draft in turn, so that a slow moment of the machine falls on both. Whole answers are timed, the prompt included. Prints one
line per answer and the sums. `engine_compare.py` does the same for Transformers and the native runtime.
"""

import argparse
import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import xllamacpp
from chat_prompts import PROMPTS


def start_server(folder: Path, file_type: str, *, gamma: int, num_threads: int) -> Any:
    """A server for the target alone (gamma 0) or with the draft; p_min 0 keeps gamma constant, as elsewhere."""
    params = xllamacpp.CommonParams()
    params.model.path = str(folder / f"target-{file_type}.gguf")
    params.n_ctx, params.n_parallel, params.verbosity = 2048, 1, -1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = num_threads
    if gamma:
        draft = params.speculative.draft
        params.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
        draft.mparams.path = str(folder / f"draft-{file_type}.gguf")
        draft.n_max, draft.n_min, draft.p_min = gamma, 0, 0.0
        draft.cpuparams.n_threads = draft.cpuparams_batch.n_threads = num_threads
    return xllamacpp.Server(params)


def answer(server: Any, prompt: str, max_tokens: int) -> tuple[str, dict[str, float]]:
    """The greedy text and the server's own timings."""
    request = {
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "cache_prompt": False,
    }
    response = server.handle_chat_completions(request)
    response = json.loads(response) if isinstance(response, str) else response
    return response["choices"][0]["message"]["content"], response["timings"]


def main() -> None:
    """Compare, print, and end with 1 when a text differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--type", default="q8_0")
    parser.add_argument("--gamma", type=int, help="default: that of the export (pair.json)")
    parser.add_argument("--num-prompts", type=int, default=len(PROMPTS))
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--passes", type=int, default=2, help="over all prompts")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    gamma = options.gamma or json.loads((options.folder / "pair.json").read_text())["num_speculative_tokens"]
    plain = start_server(options.folder, options.type, gamma=0, num_threads=options.threads)
    drafted = start_server(options.folder, options.type, gamma=gamma, num_threads=options.threads)
    sums: Counter[str] = Counter()
    for prompt in PROMPTS[: options.num_prompts] * options.passes:
        text, without = answer(plain, prompt, options.max_tokens)
        text_drafted, timings = answer(drafted, prompt, options.max_tokens)
        sums["tokens"] += without["predicted_n"]
        plain_ms, drafted_ms = (t["prompt_ms"] + t["predicted_ms"] for t in (without, timings))
        sums["plain_ms"] += plain_ms
        sums["drafted_ms"] += drafted_ms * without["predicted_n"] / timings["predicted_n"]
        sums["forwards"] += timings["predicted_n"] - timings.get("draft_n_accepted", 0)
        sums["drafted_tokens"] += timings["predicted_n"]
        sums["proposed"] += timings.get("draft_n", 0)
        sums["accepted"] += timings.get("draft_n_accepted", 0)
        sums["different"] += text != text_drafted
        same = "same" if text == text_drafted else "DIFFERS"
        speeds = [1e3 * without["predicted_n"] / plain_ms, 1e3 * timings["predicted_n"] / drafted_ms]
        print(f"{same}  {speeds[0]:.1f} -> {speeds[1]:.1f} tok/s  {prompt}")
    print(
        f"{options.type}, gamma {gamma}, {options.threads} thread(s): {1e3 * sums['tokens'] / sums['plain_ms']:.1f} tok/s plain, "
        f"{1e3 * sums['tokens'] / sums['drafted_ms']:.1f} with the draft ({sums['plain_ms'] / sums['drafted_ms']:.2f}x); "
        f"{sums['accepted']:.0f} of {sums['proposed']:.0f} proposed tokens accepted, "
        f"{sums['drafted_tokens'] / sums['forwards']:.2f} tokens per target forward; {sums['different']:.0f} texts differ"
    )
    sys.exit(1 if sums["different"] else 0)


if __name__ == "__main__":
    main()
