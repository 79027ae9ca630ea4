"""A tiny finished corpus, and contexts of the distill stage on it."""

from pathlib import Path

from distill.config import TrainConfig
from pipeline.context import StageContext
from pipeline.corpus.stage import run_corpus
from pipeline.schema import Config
from tests.unit.pipeline.corpus_samples import make_context, tiny_config


def tiny_corpus(folder: Path) -> tuple[Config, Path]:
    """A configuration of two training steps of one layer, and its corpus stage's folder."""
    config = tiny_config(folder / "artifacts", held_out_fraction=0.4)
    config.draft.num_layers = 1
    config.train = TrainConfig(max_steps=2, tokens_per_step=32, autocast_dtype="float32", eval_every_steps=2)
    run_corpus(make_context(config, folder / "corpus"))
    return config, folder / "corpus"


def context_of(corpus: tuple[Config, Path], work_dir: Path) -> StageContext:
    """What the runner would hand to the distill stage."""
    config, folder = corpus
    made = make_context(config, work_dir)
    return StageContext(config, work_dir, {"corpus": folder}, made.tracker, made.target)
