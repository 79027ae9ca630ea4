"""What the engine's options for speed gain or cost here: packed weights, one width for all forwards, torch.compile.

Each option is set beside the default (`pack_weights=true`, the rest off), in plain decoding and with the exported draft:
the same held-out prompts, temperature 0, in alternation in one process; ratios of tokens per second with 95% intervals
over groups of prompts. With `--compile`, compiled steps too, whose first minutes of compilation are not timed.

    python scripts/compare_options.py                     (needs an exported draft: make distill)
    python scripts/compare_options.py --batch 8 --num-prompts 32 --output options.json
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from eval.bootstrap import bootstrap_speedup
from pipeline.models import load_causal_lm
from pipeline.serving_inputs import ServedPair, held_out_prompts, read_pair
from specdec_runtime import DecoderConfig, Request, SpeculativeDecoder
from specdec_runtime.loading import load_draft

OPTIONS: dict[str, dict[str, bool]] = {
    "default": {},
    "pack_weights=false": {"pack_weights": False},
    "width_invariant": {"width_invariant": True},
}
COMPILED = {"compile": {"compile": True}}


def decoders(
    pair: ServedPair, gamma: int, batch: int, with_compile: bool
) -> dict[tuple[int, str], SpeculativeDecoder]:
    """By gamma (0 is plain decoding) and option."""
    target = load_causal_lm(pair.target, dtype=pair.dtype)
    draft, vocab_ids = load_draft(pair.draft, pair.dtype)
    made = {}
    for num in (0, gamma):
        for name, options in (OPTIONS | (COMPILED if with_compile else {})).items():
            config = DecoderConfig(
                num_speculative_tokens=num, max_batch_size=batch, min_conditional_acceptance=0.0, **options
            )
            made[num, name] = SpeculativeDecoder(
                target, draft if num else None, config, draft_vocab_ids=vocab_ids
            )
    return made


def measure(
    decoders: dict[tuple[int, str], SpeculativeDecoder],
    prompts: list[list[int]],
    batch: int,
    max_new_tokens: int,
) -> dict[tuple[int, str], dict[str, Any]]:
    """Seconds and tokens per group of prompts, and all outputs; the first group is decoded once before the clock counts."""
    requests = [Request(prompt, max_new_tokens) for prompt in prompts]
    groups = [requests[start : start + batch] for start in range(0, len(requests), batch)]
    for decoder in decoders.values():
        decoder.generate(groups[0])
    results: dict[tuple[int, str], dict[str, Any]] = {
        key: {"seconds": [], "tokens": [], "ids": []} for key in decoders
    }
    for index, group in enumerate(groups):
        for key in list(decoders) if index % 2 == 0 else reversed(decoders):
            start = time.perf_counter()
            outputs = decoders[key].generate(group)
            results[key]["seconds"].append(time.perf_counter() - start)
            results[key]["tokens"].append(sum(len(output.token_ids) for output in outputs))
            results[key]["ids"] += [output.token_ids for output in outputs]
    return results


def rows_of(results: dict[tuple[int, str], dict[str, Any]]) -> list[dict[str, Any]]:
    """Ratios to the default with the same gamma; outputs that are those of plain decoding under the same option."""
    rows = []
    for (gamma, name), mine in results.items():
        base, plain = results[gamma, "default"], results[0, name]
        ratio = bootstrap_speedup(mine["tokens"], mine["seconds"], base["tokens"], base["seconds"])
        rows.append(
            {
                "gamma": gamma,
                "option": name,
                "tokens_per_second": float(np.sum(mine["tokens"]) / np.sum(mine["seconds"])),
                "ratio": ratio.value,
                "low": ratio.low,
                "high": ratio.high,
                "same_as_plain": sum(a == b for a, b in zip(mine["ids"], plain["ids"], strict=True)),
                "num_prompts": len(mine["ids"]),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--artifacts", type=Path, default=Path("artifacts"))
    parser.add_argument("--gamma", type=int, help="proposal length; the exported one by default")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--num-prompts", type=int, default=10)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--compile", action="store_true", help="torch.compile as well")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    pair = read_pair(args.artifacts)
    made = decoders(pair, args.gamma or pair.num_speculative_tokens, args.batch, args.compile)
    prompts = held_out_prompts(args.artifacts, args.num_prompts, max_tokens=256)
    rows = rows_of(measure(made, prompts, args.batch, args.max_new_tokens))
    table = Table(
        title=f"options of the engine, batch {args.batch}, {torch.get_num_threads()} threads, {pair.dtype}"
    )
    for column in ("gamma", "option", "tokens/s", "ratio to the default", "same tokens as plain"):
        table.add_column(column)
    for row in rows:
        ratio = f"{row['ratio']:.2f} [{row['low']:.2f}, {row['high']:.2f}]"
        same = f"{row['same_as_plain']} of {row['num_prompts']}"
        table.add_row(str(row["gamma"]), row["option"], f"{row['tokens_per_second']:.1f}", ratio, same)
    Console().print(table)
    if args.output is not None:
        args.output.write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
