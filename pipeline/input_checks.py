"""Users' mistakes, found before any long work: each raises a ValueError that names the field, the value and the way out."""

import shutil
from pathlib import Path

from huggingface_hub import get_token
from transformers import AutoConfig, PreTrainedConfig, PreTrainedTokenizerBase

from distill.config import AUTO
from distill.liger import check_settings, require_liger
from distill.objective import Objective
from pipeline import compat
from pipeline.bench_prompts import check_prompt_file
from pipeline.corpus import check_prompts
from pipeline.corpus.backends.ray import require_ray
from pipeline.corpus.mixture import check_sources
from pipeline.initial_draft import check_draft_settings
from pipeline.launch import check_launch
from pipeline.models import DTYPES, ModelRef, load_tokenizer, obtain_model, resolve_target
from pipeline.pair import check_start_draft
from pipeline.schema import Config
from pipeline.store import Store
from pipeline.weight_files import check_weight_files
from specdec_runtime.backends.vllm import require_vllm

GIB = 2**30


def check_inputs(config: Config) -> None:
    """Everything that can be known wrong without running a model.

    Raises:
        ValueError: unwritable `artifacts_dir`, too little disk, an unusable target, draft or prompts file, sizes that
            do not fit the target.
    """
    store = Store(Path(config.artifacts_dir))
    check_disk(store.root, config.preflight.min_free_disk_gib)
    for field, dtype in (("target.dtype", config.target.dtype), ("export.dtype", config.export.dtype)):
        if dtype not in DTYPES:
            raise ValueError(f"{field}={dtype!r}: choose from {sorted(DTYPES)}")
    if config.export.push and get_token() is None:
        raise ValueError(
            "export.push=true: not logged in to Hugging Face; run `hf auth login`, or set export.push=false"
        )
    check_launch(config)
    if "distill" in config.stages and config.train.liger:
        _check_liger(config)
    # Opens them and reads one row each; here already, since the target may have to be fetched first.
    check_sources(config.corpus)
    for field, prompts in (("eval.prompts", config.eval.prompts), ("bench.prompts", config.bench.prompts)):
        if prompts is not None:
            check_prompt_file(prompts, field=field)
    if "bench" in config.stages and "vllm" in config.bench.backends:
        require_vllm()
    if "corpus" in config.stages and config.corpus.backend == "ray":
        require_ray()
    check_target(config, resolve_target(config))


def _check_liger(config: Config) -> None:
    """Raise ValueError for kernels that would refuse this training when the corpus is there."""
    check_settings(
        Objective(config.loss).weights,
        is_live=config.loss.teacher == "online",
        has_shortlist=config.draft.vocab_shortlist not in (None, AUTO),
        selects_tokens=config.train.token_selection.enabled,
    )
    require_liger()


def check_disk(folder: Path, min_free_gib: float) -> None:
    """Raise ValueError when `folder`'s disk has less room than asked for."""
    free_gib = shutil.disk_usage(folder).free / GIB
    if free_gib < min_free_gib:
        raise ValueError(
            f"artifacts_dir={folder}: {free_gib:.2f} GiB are free, preflight.min_free_disk_gib={min_free_gib:g} are asked for; "
            "free some space, choose another disk, or lower preflight.min_free_disk_gib"
        )


def check_target(config: Config, target: ModelRef) -> None:
    """Check every setting that depends on the target, and the draft that `draft.path` names."""
    trust = target.trust_remote_code
    target_config = AutoConfig.from_pretrained(target.path, trust_remote_code=trust)
    tokenizer = load_tokenizer(target.path, trust)
    check_prompts(config, tokenizer)
    compat.raise_on_errors(check_weight_files(Path(target.path), who="target", check_values=False))
    _check_lengths(config, target_config, who="target")
    _check_shortlist(config.draft.shortlist_size, target_config, tokenizer)
    if config.draft.path is None:
        check_draft_settings(config.draft, config.train, target_config)
        return
    draft = obtain_model(config.draft.path, field="draft.path")
    compat.raise_on_errors(check_start_draft(target.path, draft, trust_remote_code=trust))
    _check_lengths(config, AutoConfig.from_pretrained(draft, trust_remote_code=trust), who="draft")


def _check_lengths(config: Config, model_config: PreTrainedConfig, *, who: str) -> None:
    limit = compat.context_length(model_config)
    corpus, bench = config.corpus, config.bench
    if limit is None:
        return
    if corpus.max_prompt_tokens + corpus.max_new_tokens > limit:
        raise ValueError(
            f"corpus.max_prompt_tokens={corpus.max_prompt_tokens} + corpus.max_new_tokens={corpus.max_new_tokens} is more than the "
            f"{limit} positions that the {who} reads; lower one of them"
        )
    if who == "target" and corpus.max_prompt_tokens + bench.max_new_tokens > limit:
        raise ValueError(
            f"corpus.max_prompt_tokens={corpus.max_prompt_tokens} + bench.max_new_tokens={bench.max_new_tokens} is more than the "
            f"{limit} positions that the target reads; lower one of them"
        )


def _check_shortlist(
    num_ids: int | None, target_config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> None:
    if num_ids is None:
        return
    vocab_size, num_special = (
        int(target_config.get_text_config().vocab_size),
        len(set(tokenizer.all_special_ids)),
    )
    if not num_special <= num_ids <= vocab_size:
        raise ValueError(
            f"draft.vocab_shortlist={num_ids}: choose from {num_special} (the special tokens) to {vocab_size} (the target's "
            "vocabulary), or null for the whole head"
        )
