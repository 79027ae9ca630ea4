"""All prompts of a corpus as one stream: one source, or several by weight."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Optional

from transformers import PreTrainedTokenizerBase

from pipeline.corpus.accounting import Accounting
from pipeline.corpus.chat import require_chat_template
from pipeline.corpus.policy import Dealer
from pipeline.corpus.prompts import Admission, Prompt, PromptReader
from pipeline.corpus.sources import read_records
from pipeline.corpus_schema import CorpusConfig, SourceConfig
from pipeline.schema import Config
from pipeline.store import file_revision, fingerprint_of

log = logging.getLogger(__name__)

#: Given how many are wanted, what passes each prompt once, and their domain: the questions that the target invents.
Ask = Callable[[int, Admission, str], Iterator[Prompt]]


def sources_of(corpus: CorpusConfig) -> list[SourceConfig]:
    """The sources of a corpus: the mixture's, or the one of `corpus.prompts`."""
    if corpus.mixture:
        return list(corpus.mixture)
    return [
        SourceConfig(
            prompts=corpus.prompts,
            column=corpus.prompts_column,
            split=corpus.prompts_split,
            subset=corpus.prompts_subset,
            domain_column=corpus.domain_column,
        )
    ]


def source_name(source: SourceConfig) -> str:
    """What a source is called where it is listed."""
    return "self_asked" if source.prompts is None else Path(source.prompts).name


def check_prompts(config: Config, tokenizer: PreTrainedTokenizerBase) -> None:
    """Find the mistakes in `corpus` and `target.chat` that can be found before any long work.

    Raises:
        ValueError: chat without a chat template, no prompts for a base model, a missing or empty file, no such column, a setting
            of the other kind of target.
    """
    corpus, sources = config.corpus, sources_of(config.corpus)
    if config.target.chat and corpus.prefix_tokens is not None:
        raise ValueError(
            f"corpus.prefix_tokens={corpus.prefix_tokens}: only the texts of a base model (target.chat=false) are cut; set it to null"
        )
    if not config.target.chat and corpus.turn_by_turn:
        raise ValueError("corpus.turn_by_turn=true: the texts of a base model (target.chat=false) have no turns; set it to false")
    if config.target.chat:
        require_chat_template(tokenizer)
    elif any(source.prompts is None for source in sources):
        raise ValueError(
            "target.chat=false: a base model cannot invent questions; set corpus.prompts=<file or dataset>"
        )
    check_sources(config.corpus)


def check_sources(corpus: CorpusConfig) -> None:
    """Open each file or dataset and look at its first row.

    Raises:
        ValueError: as `read_records`.
    """
    for source in sources_of(corpus):
        if source.prompts is not None:
            read_records(source)


def count_rows(corpus: CorpusConfig) -> int:
    """Rows of all files and datasets of a corpus, by reading through them."""
    return sum(
        sum(1 for _ in read_records(source)) for source in sources_of(corpus) if source.prompts is not None
    )


def sources_revision(corpus: CorpusConfig) -> Optional[str]:
    """A hash of all sources by their content and not by their place; None where the target asks itself alone."""
    sources = sources_of(corpus)
    if corpus.prompts is None and not corpus.mixture:
        return None
    return fingerprint_of(
        {"sources": [{**vars(source), "prompts": _content(source.prompts)} for source in sources]}
    )


def _content(prompts: Optional[str]) -> Optional[str]:
    if prompts is None:
        return None
    place = Path(prompts)
    if place.is_dir():
        files = sorted(file for file in place.rglob("*") if file.is_file())
        return fingerprint_of({str(file.relative_to(place)): file_revision(file) for file in files})
    return file_revision(place) if place.is_file() else prompts


class PromptStream:
    """The prompts of a corpus in a fixed order, read as they are asked for; iterate once.

    Of n prompts each source gives its weight's share of n, to within one. The mixture ends with the first source
    that does, so that the shares hold for every prompt that was given out.
    """

    def __init__(
        self,
        config: Config,
        tokenizer: PreTrainedTokenizerBase,
        accounting: Accounting,
        ask: Optional[Ask] = None,
    ) -> None:
        """Open the sources.

        Args:
            ask: makes the target's own questions; needed where a source has no `prompts`.

        Raises:
            ValueError: as `read_records`.
        """
        corpus = config.corpus
        self.accounting, self.num_wanted = accounting, corpus.num_prompts
        self.sources = sources_of(corpus)
        self.exhausted: Optional[str] = None
        self._dealer = Dealer([source.weight for source in self.sources])
        admission = Admission(corpus.max_prompt_tokens)
        reader = PromptReader(config, tokenizer, accounting, admission)
        self._streams: list[Iterator[Prompt]] = []
        for index, source in enumerate(self.sources):
            if source.prompts is not None:
                self._streams.append(reader.prompts(source))
                continue
            assert ask is not None and corpus.num_prompts is not None
            self._streams.append(ask(self._num_of(index), admission, source.domain))

    def _num_of(self, index: int) -> int:
        """How many of the wanted prompts fall to a source."""
        assert self.num_wanted is not None
        dealer = Dealer([source.weight for source in self.sources])
        if len(self.sources) == 1:
            return self.num_wanted
        for _ in range(self.num_wanted):
            dealer.take(dealer.next())
        return dealer.counts[index]

    def __iter__(self) -> Iterator[Prompt]:
        """The prompts.

        Raises:
            ValueError: after the last row, when no row could be used.
        """
        num_given = 0
        try:
            while num_given != self.num_wanted:
                index = self._dealer.next()
                prompt = next(self._streams[index], None)
                if prompt is None:
                    self._end(index)
                    break
                self._dealer.take(index)
                num_given += 1
                yield prompt
        finally:
            for stream in self._streams:
                stream.close()  # type: ignore[attr-defined]
        if num_given == 0:
            names = ", ".join(repr(source.prompts) for source in self.sources)
            raise ValueError(
                f"corpus.prompts={names}: none of the {self.accounting.num_requested} rows read can be used: "
                f"{dict(self.accounting.skipped)}"
            )

    def _end(self, index: int) -> None:
        self.exhausted = source_name(self.sources[index])
        num_given = sum(self._dealer.counts)
        if self.num_wanted is not None and len(self.sources) > 1:
            log.warning(
                "corpus.mixture ends after %d of %d prompts, because %s has no more: give it a smaller weight or more rows",
                num_given, self.num_wanted, self.exhausted,
            )  # fmt: skip

    def describe(self) -> dict[str, Any]:
        """What was given out so far, for `corpus.json`."""
        total = max(1, sum(self._dealer.counts))
        return {
            "sources": [
                {
                    "source": source_name(source),
                    "domain": source.domain,
                    "weight": source.weight,
                    "num_prompts": count,
                    "share": count / total,
                }
                for source, count in zip(self.sources, self._dealer.counts, strict=True)
            ],
            "exhausted": self.exhausted,
        }
