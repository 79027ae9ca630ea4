"""A Llama, Mistral, Qwen2 or Qwen3 model as one GGUF file for llama.cpp: metadata, tensors, tokenizer.

Names come from the `gguf` package's map. In GGUF's `llama` architecture the rotary pairs lie beside each other, in
Transformers half a head apart, so the rows of q and k are reordered; Qwen's are kept.
"""

import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType
from numpy.typing import NDArray
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from pipeline.gguf_export_tokenizer import WAY_OUT, add_tokenizer

log = logging.getLogger(__name__)

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
}
FILE_TYPES = {"f16": LlamaFileType.MOSTLY_F16, "q8_0": LlamaFileType.MOSTLY_Q8_0}
Q8_BLOCK = 32


def write_gguf(
    path: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, file_type: str, name: str
) -> None:
    """Write `path`, whole or not at all.

    Args:
        file_type: f16 (matrices in half precision) or q8_0 (blocks of 32 eight-bit numbers); vectors stay in fp32.

    Raises:
        ValueError: an architecture, rotary setting or tokenizer that this writer does not know, or values beyond f16.
    """
    if file_type not in FILE_TYPES:
        raise ValueError(f"file type {file_type!r}: choose from {sorted(FILE_TYPES)}")
    config = model.config.get_text_config()
    if config.model_type not in ARCHITECTURES:
        raise ValueError(
            f"GGUF export knows {sorted(ARCHITECTURES)} and not {config.model_type!r}: {WAY_OUT}"
        )
    architecture = ARCHITECTURES[config.model_type]
    fresh = path.with_name(f".{path.name}.tmp")
    writer = GGUFWriter(fresh, gguf.MODEL_ARCH_NAMES[architecture])
    writer.add_name(name)
    writer.add_file_type(FILE_TYPES[file_type])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    _add_config(writer, config)
    add_tokenizer(writer, tokenizer, vocab_size=config.vocab_size)
    for tensor_name, values in gguf_tensors(model, architecture):
        data, kind = _encode(values, file_type, tensor_name)
        writer.add_tensor(tensor_name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    fresh.replace(path)


def _add_config(writer: GGUFWriter, config: PreTrainedConfig) -> None:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_vocab_size(config.vocab_size)
    if getattr(config, "sliding_window", None) and config.model_type == "mistral":
        log.warning(
            "llama.cpp reads no sliding window for this architecture: keep texts within %d tokens",
            config.sliding_window,
        )
    _add_rope(writer, rope_settings(config))


def rope_settings(config: PreTrainedConfig) -> dict[str, Any]:
    """The rotary settings, with `rope_type` and `rope_theta` always there."""
    return {"rope_type": "default", "rope_theta": 10000.0, **(config.rope_parameters or {})}


def _add_rope(writer: GGUFWriter, rope: dict[str, Any]) -> None:
    writer.add_rope_freq_base(rope["rope_theta"])
    kind = rope["rope_type"]
    if kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    elif kind == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    elif kind not in ("default", "llama3"):  # llama3 is a tensor of factors
        raise ValueError(f"GGUF export does not know rope_type={kind!r}: {WAY_OUT}")


def gguf_tensors(
    model: PreTrainedModel, architecture: gguf.MODEL_ARCH
) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """(GGUF name, fp32 values) of each weight, tied ones once."""
    config = model.config.get_text_config()
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    is_llama = architecture == gguf.MODEL_ARCH.LLAMA
    for name, parameter in model.named_parameters():
        mapped = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if mapped is None:
            raise ValueError(f"GGUF's {architecture.name} architecture has no place for {name}: {WAY_OUT}")
        values = parameter.detach().float().cpu().numpy()
        if is_llama and ".q_proj." in name:
            values = _reorder_rotary_rows(values, config.num_attention_heads)
        elif is_llama and ".k_proj." in name:
            values = _reorder_rotary_rows(values, config.num_key_value_heads)
        yield mapped, values
    if rope_settings(config)["rope_type"] == "llama3":
        yield "rope_freqs.weight", llama3_factors(config)


def _reorder_rotary_rows(values: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Row i and row i + half of each head come to lie beside each other."""
    halves = values.reshape(num_heads, 2, values.shape[0] // num_heads // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


def llama3_factors(config: PreTrainedConfig) -> NDArray[np.float32]:
    """By how much Llama 3.1 slows each rotary frequency, shape [head_dim / 2]."""
    rope = rope_settings(config)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    wavelengths = 2 * math.pi * rope["rope_theta"] ** (np.arange(0, head_dim, 2) / head_dim)
    original = rope["original_max_position_embeddings"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = ((original / wavelengths - low) / (high - low)).clip(0, 1)
    factors: NDArray[np.float32] = (1 / ((1 - smooth) / rope["factor"] + smooth)).astype(np.float32)
    return factors


def _encode(
    values: NDArray[np.float32], file_type: str, name: str
) -> tuple[NDArray[Any], GGMLQuantizationType]:
    """Vectors in fp32; matrices as asked for, in f16 where their rows are no multiple of a q8_0 block."""
    if values.ndim == 1:
        return values, GGMLQuantizationType.F32
    if file_type == "q8_0" and values.shape[-1] % Q8_BLOCK == 0:
        kind = GGMLQuantizationType.Q8_0
        return gguf.quants.quantize(values, kind), kind
    with np.errstate(over="ignore"):
        half = values.astype(np.float16)
    if not np.isfinite(half).all():
        raise ValueError(
            f"{name} has values beyond half precision: choose q8_0, or keep the model in another format"
        )
    return half, GGMLQuantizationType.F16
