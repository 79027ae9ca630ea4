"""What lies beside the exported draft so that it can be served: start lines of the engines, and a Transformers script.

All of them name the draft relative to their own folder, so the folder can be moved or copied to another machine.
"""

import json
import shlex
from pathlib import Path
from typing import Any

from pipeline.serving_scripts import (
    ASSISTED_GENERATION,
    FIND,
    SERVE_SH,
    SGLANG_SH,
    TENSORRT_LLM_SH,
    TENSORRT_LLM_YAML,
)
from specdec_runtime.backends.vllm_cpu import MAX_CPUS_TO_BIND


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
    hub_id: str | None = None,
    prompt: str = "Why is the sky blue?",
) -> None:
    """Write vLLM's, SGLang's and TensorRT-LLM's start lines and settings, and `assisted_generation.py`, beside `draft/`.

    Args:
        target: a folder, or a Hugging Face id. hub_id: of the same model, for machines that do not have the folder.
    """
    config = speculative_config(gamma=gamma, draft_sample_method=draft_sample_method)
    (folder / "speculative_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for name, template in (
        ("serve.sh", SERVE_SH),
        ("sglang.sh", SGLANG_SH),
        ("tensorrt_llm.sh", TENSORRT_LLM_SH),
    ):
        script = folder / name
        text = template.format(
            target=shlex.quote(target),
            hub_id=shlex.quote(hub_id or ""),
            find=FIND,
            gamma=gamma,
            num_verified=gamma + 1,
            max_cpus=MAX_CPUS_TO_BIND,
        )
        script.write_text(text, encoding="utf-8")
        script.chmod(0o755)
    (folder / "tensorrt_llm.yaml").write_text(TENSORRT_LLM_YAML.format(gamma=gamma), encoding="utf-8")
    (folder / "assisted_generation.py").write_text(
        ASSISTED_GENERATION.format(target=target, hub_id=hub_id, dtype=dtype, prompt=prompt), encoding="utf-8"
    )
