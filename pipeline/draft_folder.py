"""A trained draft as a plain Hugging Face folder that fits its target: checked before it is written, loaded back afterwards."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from pipeline import compat
from pipeline.head_rows import confine_head, fit_vocab_size
from pipeline.models import ModelRef, load_causal_lm, load_tokenizer
from pipeline.weight_files import check_weight_files, has_untied_head, pickle_files

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
    "chat_template.jinja",
    "chat_template.json",
)
VLLM_ALWAYS_TIED = "gemma"
NUM_CHECKED_TOKENS = 16


def export_draft(
    source: Path,
    folder: Path,
    *,
    target: ModelRef,
    dtype: str,
    gamma: int,
    copied_layers: bool,
    vocab_ids: Sequence[int] | None = None,
) -> tuple[PreTrainedModel, list[compat.Finding]]:
    """Write the draft in `source` to `folder`; return the model as it was written, and the warnings.

    Args:
        source: a Hugging Face folder (sharded or not, tied or untied head).
        folder: made anew; what a killed attempt left there is removed.
        target: its tokenizer and special tokens become the draft's.
        gamma: proposed tokens, stored where Transformers' assisted generation looks for it.
        vocab_ids: the shortlist that the head was trained over, or None.
        copied_layers: the layers are the target's, so the rotary settings must be too.

    Raises:
        ValueError: a check failed, before anything was written; the message names each reason.
    """
    trust, target_dir = target.trust_remote_code, Path(target.path)
    tokenizer = load_tokenizer(target.path, trust)
    target_config = AutoConfig.from_pretrained(target.path, trust_remote_code=trust)
    compat.raise_on_errors(check_weight_files(source, who="draft"))
    # Loaded in the final dtype, not cast later: `model.to` would round the rotary tables too, which loading keeps in fp32.
    model = load_causal_lm(str(source), dtype, trust, device="cpu", field="draft")
    findings = compat.check_shapes(model.config) + compat.demote(
        compat.check_context_length(target_config, model.config), ("context_length",)
    )
    if copied_layers:
        findings += compat.check_rope(target_config, model.config)
    compat.raise_on_errors(findings)
    vocab_size = int(target_config.get_text_config().vocab_size)
    fit_vocab_size(model, vocab_size, num_token_ids=max(tokenizer.get_vocab().values()) + 1)
    _say_untied(model)
    findings += _untied_gemma(model)
    if vocab_ids is not None:
        findings += _confine(model, vocab_ids)
    _require_finite(model, dtype)
    model.generation_config = clean_generation_config(
        target_dir, target_config.get_text_config().pad_token_id, gamma=gamma
    )
    model.config.use_cache = True
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)
    copy_tokenizer(target_dir, folder, tokenizer)
    check_written(folder, model, vocab_size=vocab_size)
    return model, findings


def _confine(model: PreTrainedModel, vocab_ids: Sequence[int]) -> list[compat.Finding]:
    """Silence untrained head rows, but where vLLM insists on a tied head: there they stay, and it is said."""
    model_type = str(model.config.model_type)
    if not model_type.startswith(VLLM_ALWAYS_TIED) or not model.config.get_text_config().tie_word_embeddings:
        confine_head(model, vocab_ids)
        return []
    message = (
        f"vLLM loads {model_type} with a tied head only, so head rows outside the shortlist of {len(vocab_ids)} ids stay as they are: "
        "engines other than the native runtime may propose from them; train with draft.vocab_shortlist=null to serve there"
    )
    return [compat.Finding("full_head", compat.WARNING, message)]


def _say_untied(model: PreTrainedModel) -> None:
    """Let the config say of a head with rows of its own that it is not tied: vLLM believes the config, and would not read it."""
    if not has_untied_head(model):
        return
    for config in (model.config, model.config.get_text_config()):
        config.tie_word_embeddings = False
    model.all_tied_weights_keys = model.get_expanded_tied_weights_keys(all_submodels=False)


def _untied_gemma(model: PreTrainedModel) -> list[compat.Finding]:
    """A head of the draft's own that vLLM would not read."""
    model_type = str(model.config.model_type)
    if not model_type.startswith(VLLM_ALWAYS_TIED) or model.config.get_text_config().tie_word_embeddings:
        return []
    message = (
        f"vLLM loads {model_type} with a tied head only, so it would not use the head that this draft was trained with: "
        "train with draft.train_head=false to serve there"
    )
    return [compat.Finding("own_head", compat.WARNING, message)]


def _require_finite(model: PreTrainedModel, dtype: str) -> None:
    for name, tensor in model.named_parameters():
        if not bool(torch.isfinite(tensor).all()):
            raise ValueError(
                f"export.dtype={dtype}: the weights of {name} are not finite in it; choose bfloat16 or float32"
            )


def clean_generation_config(target: Path, pad_token_id: int | None, *, gamma: int) -> GenerationConfig:
    """Only the ids that begin, end and pad a text, and gamma: no penalty or warper of the target's defaults."""
    try:
        settings = GenerationConfig.from_pretrained(target)
    except OSError:  # older folders have none
        settings = GenerationConfig.from_model_config(AutoConfig.from_pretrained(target))
    return GenerationConfig(
        bos_token_id=settings.bos_token_id,
        eos_token_id=settings.eos_token_id,
        pad_token_id=settings.pad_token_id if settings.pad_token_id is not None else pad_token_id,
        num_assistant_tokens=gamma,
        num_assistant_tokens_schedule="constant",
        assistant_confidence_threshold=0.0,
    )


def copy_tokenizer(target: Path, folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """The target's own files, byte for byte; written by the tokenizer where the target's folder has none."""
    copied = [
        shutil.copyfile(target / name, folder / name) for name in TOKENIZER_FILES if (target / name).is_file()
    ]
    if not copied:
        tokenizer.save_pretrained(folder)


def check_written(folder: Path, model: PreTrainedModel, *, vocab_size: int) -> None:
    """Load the folder back: nothing missing, the same width, the same logits to the bit, no pickle, no penalty.

    Raises:
        ValueError: what was written is not what was meant.
    """
    compat.raise_on_errors(check_weight_files(folder, who="exported draft"))
    compat.raise_on_errors(
        compat.check_generation_config(compat.read_json(folder / "generation_config.json"))
    )
    if pickled := pickle_files(folder):
        raise ValueError(f"{folder} holds pickled files {[path.name for path in pickled]}: remove them")
    reloaded, info = AutoModelForCausalLM.from_pretrained(folder, dtype=model.dtype, output_loading_info=True)
    if info["missing_keys"] or info["unexpected_keys"] or info["mismatched_keys"]:
        raise ValueError(f"{folder} does not load as it was saved: {info}")
    if reloaded.config.get_text_config().vocab_size != vocab_size:
        raise ValueError(
            f"{folder} has vocab_size {reloaded.config.get_text_config().vocab_size}, the target has {vocab_size}"
        )
    ids_BT = torch.arange(min(NUM_CHECKED_TOKENS, vocab_size)).unsqueeze(0)
    with torch.no_grad():
        same = torch.equal(model(input_ids=ids_BT).logits, reloaded.eval()(input_ids=ids_BT).logits)
    if not same:
        raise ValueError(f"{folder} gives other logits than the draft that was saved there")
