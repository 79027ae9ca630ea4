"""The sampling policy: which temperature, nucleus and seed each answer gets."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence

from pipeline.corpus.rows import Prompt, Row
from pipeline.corpus_schema import CorpusConfig


class Dealer:
    """Deals things out by weight, one at a time, without knowing how many there will be.

    After n deals every weight's count lies within one of its share of n, as long as nothing was barred; what was
    barred is caught up afterwards. The order follows from the weights alone.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        total = sum(weights)
        self.shares = [weight / total for weight in weights]
        self.counts = [0] * len(self.shares)

    def next(self, barred: frozenset[int] = frozenset()) -> int:
        """The index that is furthest behind its share; the first among equals. `barred` ones are passed over."""
        num_dealt = sum(self.counts) + 1
        allowed = [index for index in range(len(self.shares)) if index not in barred]
        # Rounded, so that equal shares stay equal whatever the last bit of their products says.
        return max(allowed, key=lambda index: (round(self.shares[index] * num_dealt - self.counts[index], 9), -index))

    def take(self, index: int) -> None:
        """Count a deal."""
        self.counts[index] += 1


def plan_rows(prompts: Iterable[Prompt], corpus: CorpusConfig) -> Iterator[Row]:
    """`samples_per_prompt` rows for each prompt, lazily, the shares dealt out over them in turn.

    At most one sample of a prompt is greedy: a second one would be the same text.
    """
    dealer = Dealer([share.share for share in corpus.shares])
    greedy = frozenset(index for index, share in enumerate(corpus.shares) if share.temperature == 0)
    for prompt in prompts:
        barred: frozenset[int] = frozenset()
        for sample_index in range(corpus.samples_per_prompt):
            index = dealer.next(barred)
            dealer.take(index)
            if index in greedy:
                barred = greedy
            share = corpus.shares[index]
            yield Row(
                prompt_id=prompt.prompt_id,
                source=prompt.source,
                domain=prompt.domain,
                prompt_token_ids=prompt.token_ids,
                temperature=share.temperature,
                top_p=share.top_p,
                seed=row_seed(corpus.seed, prompt.prompt_id, share.temperature, share.top_p, sample_index),
                sample_index=sample_index,
                max_new_tokens=corpus.max_new_tokens,
                row=prompt.row,
            )


def row_seed(seed: int, prompt_id: str, temperature: float, top_p: float, sample_index: int) -> int:
    """A row's own seed (63 bits), from the corpus's seed and what the row is."""
    text = f"answer:{seed}:{prompt_id}:{temperature:g}:{top_p:g}:{sample_index}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def share_temperatures(corpus: CorpusConfig) -> list[float]:
    """The different temperatures of the answers, in the order of the shares."""
    return list(dict.fromkeys(share.temperature for share in corpus.shares))
