"""What lies beside the exported draft so that it can be served: start lines of the engines, and a Transformers script.

All of them name the draft relative to their own folder, so the folder can be moved or copied to another machine.
"""

import json
import shlex
from pathlib import Path
from typing import Any

SERVE_SH = """#!/bin/sh
# Start vLLM with the draft. Another target: TARGET=<id or folder> ./serve.sh; further words go to `vllm serve`.
made_for={target}
target=${{TARGET:-$made_for}}
if [ -d "$target" ]; then target=$(cd "$target" && pwd); fi
cd "$(dirname "$0")" || exit 1
exec vllm serve "$target" --speculative-config "$(cat speculative_config.json)" "$@"
"""

SGLANG_SH = """#!/bin/sh
# Start SGLang with the draft (from its documentation; not run by Draftsmith). Another target: TARGET=<id or folder>.
# A chain of {gamma} proposals: topk 1, and one more token to verify than there are draft steps.
made_for={target}
target=${{TARGET:-$made_for}}
if [ -d "$target" ]; then target=$(cd "$target" && pwd); fi
cd "$(dirname "$0")" || exit 1
exec python -m sglang.launch_server --model-path "$target" --speculative-algorithm STANDALONE \\
  --speculative-draft-model-path ./draft --speculative-num-steps {gamma} --speculative-eagle-topk 1 \\
  --speculative-num-draft-tokens {num_verified} "$@"
"""

TENSORRT_LLM_SH = """#!/bin/sh
# Start TensorRT-LLM with the draft (from its documentation; not run by Draftsmith). Another target: TARGET=<id or folder>.
made_for={target}
target=${{TARGET:-$made_for}}
if [ -d "$target" ]; then target=$(cd "$target" && pwd); fi
cd "$(dirname "$0")" || exit 1
exec trtllm-serve "$target" --extra_llm_api_options tensorrt_llm.yaml "$@"
"""

TENSORRT_LLM_YAML = """# PyTorch backend; speculative_model is relative to the folder in which the server starts.
disable_overlap_scheduler: true
speculative_config:
  decoding_type: Draft_Target
  max_draft_len: {gamma}
  speculative_model: ./draft
"""

ASSISTED_GENERATION = '''"""Assisted generation with Transformers: the draft in ./draft proposes, the target decides.

    python assisted_generation.py [--target FOLDER_OR_ID] [--max-new-tokens N] [PROMPT]

The number of proposed tokens comes from draft/generation_config.json (num_assistant_tokens). The text is the target's own:
at temperature 0 in fp32 it is the same as without the draft.
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

DRAFT = Path(__file__).resolve().parent / "draft"
TARGET = {target!r}

parser = argparse.ArgumentParser()
parser.add_argument("prompt", nargs="?", default={prompt!r})
parser.add_argument("--target", default=TARGET)
parser.add_argument("--max-new-tokens", type=int, default=64)
parser.add_argument("--dtype", default={dtype!r})
parser.add_argument("--plain", action="store_true", help="decode without the draft, for comparison")
args = parser.parse_args()

tokenizer = AutoTokenizer.from_pretrained(DRAFT)
target = AutoModelForCausalLM.from_pretrained(args.target, dtype=getattr(torch, args.dtype))
draft = AutoModelForCausalLM.from_pretrained(DRAFT, dtype=getattr(torch, args.dtype))
if tokenizer.chat_template:
    messages = [{{"role": "user", "content": args.prompt}}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
else:
    inputs = tokenizer(args.prompt, return_tensors="pt")
inputs = {{"input_ids": inputs["input_ids"], "attention_mask": inputs["attention_mask"]}}
output = target.generate(**inputs, max_new_tokens=args.max_new_tokens, do_sample=False, pad_token_id=tokenizer.pad_token_id,
                         assistant_model=None if args.plain else draft)
print(tokenizer.decode(output[0, inputs["input_ids"].shape[1]:], skip_special_tokens=True))
'''


def speculative_config(*, gamma: int, draft_sample_method: str) -> dict[str, Any]:
    """vLLM's `--speculative-config` for a standalone draft; `model` is relative to the folder of the file."""
    return {
        "method": "draft_model",
        "model": "./draft",
        "num_speculative_tokens": gamma,
        "draft_sample_method": draft_sample_method,
    }


def write_serving_files(
    folder: Path,
    *,
    target: str,
    gamma: int,
    draft_sample_method: str,
    dtype: str,
    prompt: str = "Why is the sky blue?",
) -> None:
    """Write vLLM's, SGLang's and TensorRT-LLM's start lines and settings, and `assisted_generation.py`, beside `draft/`."""
    config = speculative_config(gamma=gamma, draft_sample_method=draft_sample_method)
    (folder / "speculative_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for name, template in (
        ("serve.sh", SERVE_SH),
        ("sglang.sh", SGLANG_SH),
        ("tensorrt_llm.sh", TENSORRT_LLM_SH),
    ):
        script = folder / name
        text = template.format(target=shlex.quote(target), gamma=gamma, num_verified=gamma + 1)
        script.write_text(text, encoding="utf-8")
        script.chmod(0o755)
    (folder / "tensorrt_llm.yaml").write_text(TENSORRT_LLM_YAML.format(gamma=gamma), encoding="utf-8")
    (folder / "assisted_generation.py").write_text(
        ASSISTED_GENERATION.format(target=target, dtype=dtype, prompt=prompt), encoding="utf-8"
    )
