"""Which rows train, which choose the checkpoint, and which are reported on: exact complements by content hash."""

from dataclasses import dataclass

from datasets import Dataset

from pipeline.context import StageContext
from pipeline.corpus import read_corpus, split_corpus


@dataclass(frozen=True)
class CorpusParts:
    """`validation` picks the best checkpoint and `test` gives the reported figures, so no figure was tuned on."""

    train: Dataset
    validation: Dataset
    test: Dataset


def corpus_parts(context: StageContext) -> CorpusParts:
    """The three parts of the corpus stage's rows.

    Raises:
        ValueError: a part is empty; says which setting makes it larger.
    """
    rows = read_corpus(context.inputs["corpus"])
    train, held_out = split_corpus(rows, context.config.corpus.held_out_fraction)
    validation, test = split_corpus(held_out, 0.5, salt="test")
    parts = CorpusParts(train=train, validation=validation, test=test)
    for name, part in vars(parts).items():
        if len(part) == 0:
            raise ValueError(f"the corpus's {len(rows)} rows leave none for {name}: raise corpus.num_prompts or set "
                             f"corpus.held_out_fraction (now {context.config.corpus.held_out_fraction}) further from 0 and 1")
    return parts
