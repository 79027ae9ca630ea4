"""The corpus: text that the target wrote, as token ids with the target's own log-probabilities."""

from pipeline.corpus.mixture import check_prompts
from pipeline.corpus.read import read_corpus, split_corpus

__all__ = ["check_prompts", "read_corpus", "split_corpus"]
