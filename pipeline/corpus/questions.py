"""Questions that the target invents: given the chat template up to the user's words, it writes the user's turn.

After Xu et al. 2024 (Magpie). System prompts, topics and the first words of the question are drawn per question,
because the bare template alone gives a narrow choice of subjects. A question that is cut by its length ends with its
last whole sentence.
"""

import hashlib
import math
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from pipeline.corpus.accounting import Accounting
from pipeline.corpus.backends.base import (
    CorpusBackend,
    FinishedRow,
    Options,
    common_prefix,
    generate_in_order,
)
from pipeline.corpus.chat import UserTurn, user_turn
from pipeline.corpus.duplicates import DuplicateFilter
from pipeline.corpus.progress import CorpusProgress
from pipeline.corpus.prompts import Admission, Prompt, SkippedRow, make_prompt, row_ids
from pipeline.corpus.rows import Row
from pipeline.corpus.shards import QUESTION_SCHEMA, ShardFolder
from pipeline.corpus.target_info import TargetInfo
from pipeline.corpus_schema import CorpusConfig

SOURCE = "self_asked"
# The end of a sentence, quotes and brackets after it included; not that of a number or of an initial.
_SENTENCE_END = re.compile(r"""(?:(?<![\s.(]\w)(?<!\d)[.?!]+["'”’»)\]]*(?=\s|$))|[。？！]+[”’」』）]*""")


@dataclass(frozen=True)
class _Slot:
    """One question to be: its template text, its first words, and the seed of its samples."""

    number: int
    turn: UserTurn
    starter: str
    seed: int


class QuestionMaker:
    """Samples questions round by round; a round is a shard of `batch_size` slots, and a finished round is read back."""

    def __init__(
        self,
        corpus: CorpusConfig,
        tokenizer: PreTrainedTokenizerBase,
        target: TargetInfo,
        backend: CorpusBackend,
        *,
        domain: str = "",
    ) -> None:
        self.corpus, self.tokenizer, self.target, self.backend = corpus, tokenizer, target, backend
        self.domain = domain
        self._turns: dict[str, UserTurn] = {}

    def prompts(
        self,
        folder: Path,
        accounting: Accounting,
        progress: CorpusProgress,
        *,
        num_wanted: int,
        admission: Admission,
    ) -> Iterator[Prompt]:
        """Up to `num_wanted` different questions as prompts, round by round as they are asked for.

        There are fewer only when `max_questions_per_prompt` runs out. Every sampled question is counted; those that
        nobody asked for are `surplus`, also when the caller closes the iterator early.

        Raises:
            ValueError: not one usable question came, or the folder cannot be written.
        """
        rounds = ShardFolder(folder, QUESTION_SCHEMA)
        limit = math.ceil(num_wanted * self.corpus.max_questions_per_prompt)
        keeper = _Keeper(self, accounting, admission)
        progress.start("questions", num_rows=num_wanted, max_tokens_per_row=self.corpus.max_question_tokens)
        num_given = 0
        for index, first in enumerate(range(0, limit, self.corpus.batch_size)):
            numbers = range(first, min(first + self.corpus.batch_size, limit))
            finished = rounds.read(index)
            if finished is None:
                rows = self._sample([self._slot(number) for number in numbers], progress)
                rounds.write(index, rows)
            else:
                rows = finished.to_pylist()
            kept = keeper.consider(rows, num_missing=num_wanted - num_given)
            progress.rows_done(len(kept), reused=finished is not None)
            num_round = 0
            try:
                for prompt in kept:
                    num_round += 1
                    yield prompt
            finally:
                for prompt in kept[num_round:]:
                    accounting.skip("surplus", prompt.row)
            num_given += num_round
            if num_given >= num_wanted:
                return
        if num_given == 0:
            raise ValueError(
                f"The target invented no usable question in {limit} tries ({dict(accounting.skipped)}): raise "
                "corpus.max_question_tokens, lower corpus.min_question_tokens, or set corpus.prompts=<file or dataset>"
            )

    def domain_of(self, number: int) -> str:
        """The topic of a question, where its system prompt has one, else the source's domain."""
        system, topic, _ = self._drawn(number)
        return topic if "{topic}" in system else self.domain

    def _drawn(self, number: int) -> tuple[str, str, str]:
        """System prompt, topic and first words of a question; "" for none."""
        drawn = random.Random(f"{self.corpus.seed}:{number}")
        system = drawn.choice(self.corpus.system_prompts or [""])
        topic = drawn.choice(self.corpus.topics or [""])
        return system, topic, drawn.choice(self.corpus.question_starters or [""])

    def _slot(self, number: int) -> _Slot:
        system, topic, starter = self._drawn(number)
        system = system.replace("{topic}", topic)
        if system not in self._turns:
            self._turns[system] = user_turn(self.tokenizer, self.target, system or None)
        digest = hashlib.sha256(f"question:{self.corpus.seed}:{number}".encode()).digest()
        return _Slot(number, self._turns[system], starter, int.from_bytes(digest[:8], "big") >> 1)

    def _sample(self, slots: list[_Slot], progress: CorpusProgress) -> list[dict[str, Any]]:
        prompts = [
            self.tokenizer.encode(slot.turn.prefix + slot.starter, add_special_tokens=False) for slot in slots
        ]
        rows = [self._job(slot, ids) for slot, ids in zip(slots, prompts, strict=True)]
        options = Options(
            stop_token_ids=frozenset().union(*(slot.turn.stop_token_ids for slot in slots)),
            shared_prefix=common_prefix(rows),
            on_tokens=progress.tokens,
        )
        results = generate_in_order(self.backend, rows, options)
        return [
            self._row(slot, ids, result, options.stop_token_ids)
            for slot, ids, result in zip(slots, prompts, results, strict=True)
        ]

    def _job(self, slot: _Slot, ids: list[int]) -> Row:
        return Row(
            prompt_id=f"{SOURCE}:{slot.number}",
            source=SOURCE,
            domain="",
            prompt_token_ids=tuple(ids),
            temperature=self.corpus.self_ask_temperature,
            top_p=self.corpus.self_ask_top_p,
            seed=slot.seed,
            sample_index=0,
            max_new_tokens=self.corpus.max_question_tokens,
            row=f"{SOURCE}:{slot.number}",
        )

    def _row(self, slot: _Slot, ids: list[int], result: FinishedRow, stops: frozenset[int]) -> dict[str, Any]:
        words = [token for token in result.token_ids if token not in stops]
        whole = self.tokenizer.decode([*ids, *words], skip_special_tokens=True)
        before = self.tokenizer.decode(
            self.tokenizer.encode(slot.turn.prefix, add_special_tokens=False), skip_special_tokens=True
        )
        text = (
            whole[len(before) :] if whole.startswith(before) else slot.starter + self.tokenizer.decode(words)
        )
        finish_reason = result.failure or result.finish_reason
        end = slot.turn.suffix.strip()
        if end and end in text:
            # A template without special tokens: its end of turn is ordinary text.
            text, finish_reason = text.split(end)[0], "stop"
        return {
            "slot": slot.number,
            "text": text.strip(),
            "num_tokens": len(words),
            "finish_reason": finish_reason,
        }


class _Keeper:
    """Decides, in order, which sampled questions are asked."""

    def __init__(self, maker: QuestionMaker, accounting: Accounting, admission: Admission) -> None:
        self.maker, self.accounting, self.admission = maker, accounting, admission
        self.duplicates = DuplicateFilter(maker.corpus.near_duplicate_jaccard)

    def consider(self, rows: list[dict[str, Any]], *, num_missing: int) -> list[Prompt]:
        """Count the rows as requested, and keep up to `num_missing` of them; count why the others are not."""
        kept: list[Prompt] = []
        for row in rows:
            self.accounting.num_requested += 1
            name = f"{SOURCE}:{row['slot']}"
            try:
                if len(kept) == num_missing:
                    raise SkippedRow("surplus")
                kept.append(self._prompt(row, name))
            except SkippedRow as skipped:
                self.accounting.skip(str(skipped), name)
        return kept

    def _prompt(self, row: dict[str, Any], name: str) -> Prompt:
        corpus, tokenizer = self.maker.corpus, self.maker.tokenizer
        text, num_tokens = row["text"], row["num_tokens"]
        if row["finish_reason"] == "length":
            text = whole_sentences(text)
            if not text:
                raise SkippedRow("question_cut")
            num_tokens = len(tokenizer.encode(text, add_special_tokens=False))
        elif row["finish_reason"] != "stop":
            raise SkippedRow(row["finish_reason"])
        if num_tokens < corpus.min_question_tokens:
            raise SkippedRow("question_too_short")
        duplicate = self.duplicates.reason(text)
        if duplicate is not None:
            raise SkippedRow(duplicate)
        ids = row_ids(text, tokenizer, chat=True)
        domain = self.maker.domain_of(row["slot"])
        return self.admission.admit(make_prompt(ids, source=SOURCE, row=name, domain=domain))


def whole_sentences(text: str) -> str:
    """The text up to its last sentence end outside of a code block; "" where it has none."""
    for match in reversed(list(_SENTENCE_END.finditer(text))):
        whole = text[: match.end()]
        if whole.count("```") % 2 == 0:
            return whole
    return ""
