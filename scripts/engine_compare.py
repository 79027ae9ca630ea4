"""The native runtime and Transformers' assisted generation, each with and without the draft: same greedy text? how fast?

    PYTHONPATH=. python scripts/engine_compare.py artifacts/gguf [--dtype bfloat16] [--gamma N] [--num-prompts 8] [--passes 2]

The pair and gamma are those of `pair.json` in the folder that `make gguf` writes, the prompts those of
`llama_cpp_compare.py`. Each prompt is answered by all four in turn, so that a slow moment of the machine falls on all.
Whole answers are timed, the prompt included.
"""

import argparse
import json
import os
import time
from pathlib import Path

import torch
from chat_prompts import PROMPTS

from pipeline.models import DTYPES, load_causal_lm, load_tokenizer
from specdec_runtime import DecoderConfig, Output, Request
from specdec_runtime.backends.hf_assisted import HFAssisted
from specdec_runtime.backends.hf_generate import HFGenerate
from specdec_runtime.backends.native import NativeBackend
from specdec_runtime.loading import load_draft


def main() -> None:
    """Compare and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bfloat16")
    parser.add_argument("--gamma", type=int, help="default: that of the export (pair.json)")
    parser.add_argument("--num-prompts", type=int, default=len(PROMPTS))
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--passes", type=int, default=2, help="over all prompts")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    pair = json.loads((options.folder / "pair.json").read_text())
    gamma = options.gamma or pair["num_speculative_tokens"]
    target, tokenizer = load_causal_lm(pair["target"], options.dtype), load_tokenizer(pair["target"])
    draft, vocab_ids = load_draft(pair["draft"], DTYPES[options.dtype])
    config = DecoderConfig(num_speculative_tokens=gamma, max_batch_size=1)
    engines = {
        "native": (
            NativeBackend(target, None, config),
            NativeBackend(target, draft, config, draft_vocab_ids=vocab_ids),
        ),
        "transformers": (
            HFGenerate(target, max_batch_size=1),
            HFAssisted(target, draft, num_speculative_tokens=gamma),
        ),
    }
    for backends in engines.values():
        for backend in backends:
            backend.generate([Request(tokenizer.encode("Hello"), max_new_tokens=8)])  # caches, kernels
    runs: dict[str, tuple[list[Output], list[Output]]] = {name: ([], []) for name in engines}
    seconds = {name: [0.0, 0.0] for name in engines}
    for prompt in PROMPTS[: options.num_prompts] * options.passes:
        chat = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=True
        )
        request = Request(list(chat["input_ids"]), max_new_tokens=options.max_tokens)
        for name, backends in engines.items():
            for index, backend in enumerate(backends):
                start = time.perf_counter()
                [output] = backend.generate([request])
                seconds[name][index] += time.perf_counter() - start
                runs[name][index].append(output)
    num_answers = options.passes * len(PROMPTS[: options.num_prompts])
    print(f"{options.dtype}, gamma {gamma}, {options.threads} thread(s), {num_answers} answers")
    for name, (plain, drafted) in runs.items():
        counts = [sum(len(output.token_ids) for output in outputs) for outputs in (plain, drafted)]
        speeds = [count / spent for count, spent in zip(counts, seconds[name], strict=True)]
        num_same = sum(a.token_ids == b.token_ids for a, b in zip(plain, drafted, strict=True))
        forwards = sum(output.stats.num_rounds + output.stats.num_prefills for output in drafted)
        proposed, accepted = (
            sum(getattr(output.stats, field) for output in drafted)
            for field in ("num_proposed", "num_accepted")
        )
        print(
            f"{name}: {speeds[0]:.1f} tok/s plain, {speeds[1]:.1f} with the draft ({speeds[1] / speeds[0]:.2f}x); {accepted} of {proposed} "
            f"proposed tokens accepted, {counts[1] / forwards:.2f} tokens per target forward; {len(plain) - num_same} texts differ"
        )


if __name__ == "__main__":
    main()
