"""A tiny seeded target and settings, shared by the tests of the corpus."""

from functools import cache
from pathlib import Path

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from pipeline.context import StageContext
from pipeline.corpus.stage import run_corpus
from pipeline.corpus.worker import help_out
from pipeline.corpus_schema import CorpusConfig
from pipeline.models import resolve_target
from pipeline.random_target import build_model, build_tokenizer
from pipeline.schema import Config, RandomModelConfig, TargetConfig
from pipeline.tracker import Tracker

NUM_KILLED_ROWS = 96


@cache
def tiny_model() -> LlamaForCausalLM:
    return build_model(RandomModelConfig())


@cache
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer(RandomModelConfig().vocab_size)


def tiny_config(artifacts: Path, **corpus: object) -> Config:
    """24 self-asked prompts in shards of 8, in float32, unless `corpus` says otherwise."""
    settings: dict[str, object] = {
        "num_prompts": 24,
        "max_new_tokens": 24,
        "batch_size": 8,
        "shard_rows": 8,
        "topk": 8,
        **corpus,
    }
    target = TargetConfig(name="tiny", random=RandomModelConfig(), dtype="float32")
    return Config(artifacts_dir=str(artifacts), target=target, corpus=CorpusConfig(**settings))  # type: ignore[arg-type]


def make_context(config: Config, work_dir: Path) -> StageContext:
    """The context that the runner would hand to the stage."""
    work_dir.mkdir(parents=True, exist_ok=True)
    return StageContext(config, work_dir, {}, Tracker(), resolve_target(config))


def run_stage(artifacts: Path, work_dir: Path) -> None:
    """The stage on 96 prompts in shards of 4: the program that the tests kill."""
    torch.set_num_threads(1)
    run_corpus(make_context(_killed_config(artifacts), work_dir))


def run_helper(artifacts: Path, work_dir: Path) -> None:
    """A further worker on the same corpus."""
    torch.set_num_threads(1)
    help_out(make_context(_killed_config(artifacts), work_dir))


def _killed_config(artifacts: Path) -> Config:
    return tiny_config(artifacts, num_prompts=NUM_KILLED_ROWS, max_new_tokens=40, shard_rows=4)
