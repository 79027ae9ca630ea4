"""Questions that the target invents: given the chat template up to the user's words, it writes the user's turn.

After Xu et al. 2024 (Magpie). System prompts, topics and the first words of the question are drawn per question,
because the bare template alone gives a narrow choice of subjects.
"""

import hashlib
import math
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from pipeline.corpus.accounting import Accounting
from pipeline.corpus.chat import UserTurn, user_turn
from pipeline.corpus.duplicates import DuplicateFilter
from pipeline.corpus.generate import Generation, Generator, Job, Sampling
from pipeline.corpus.progress import CorpusProgress
from pipeline.corpus.prompts import Prompt, SkippedRow, admit, make_prompt, row_ids
from pipeline.corpus.shards import QUESTION_SCHEMA, ShardFolder
from pipeline.schema import CorpusConfig

SOURCE = "self_asked"


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
        model: PreTrainedModel,
        generator: Generator,
    ) -> None:
        self.corpus, self.tokenizer, self.model, self.generator = corpus, tokenizer, model, generator
        self._turns: dict[str, UserTurn] = {}

    def make(self, folder: Path, accounting: Accounting, progress: CorpusProgress) -> list[Prompt]:
        """Up to `num_prompts` different questions as prompts; fewer only when `max_questions_per_prompt` runs out.

        Raises:
            ValueError: not one usable question came, or the folder cannot be written.
        """
        wanted = self.corpus.num_prompts
        assert wanted is not None
        rounds = ShardFolder(folder, QUESTION_SCHEMA)
        limit = math.ceil(wanted * self.corpus.max_questions_per_prompt)
        keeper = _Keeper(self.corpus, self.tokenizer, accounting)
        progress.start("questions", num_rows=wanted, max_tokens_per_row=self.corpus.max_question_tokens)
        for index, first in enumerate(range(0, limit, self.corpus.batch_size)):
            numbers = range(first, min(first + self.corpus.batch_size, limit))
            finished = rounds.read(index)
            if finished is None:
                rows = self._sample([self._slot(number) for number in numbers], progress)
                rounds.write(index, rows)
            else:
                rows = finished.to_pylist()
            num_before = len(keeper.prompts)
            for row in rows:
                keeper.consider(row)
            progress.rows_done(len(keeper.prompts) - num_before, reused=finished is not None)
            if len(keeper.prompts) >= wanted:
                break
        if not keeper.prompts:
            raise ValueError(
                f"The target invented no usable question in {limit} tries ({dict(accounting.skipped)}): raise "
                "corpus.max_question_tokens, lower corpus.min_question_tokens, or set corpus.prompts=<file or dataset>"
            )
        return keeper.prompts

    def _slot(self, number: int) -> _Slot:
        drawn = random.Random(f"{self.corpus.seed}:{number}")
        system = drawn.choice(self.corpus.system_prompts or [""])
        topic = drawn.choice(self.corpus.topics or [""])
        starter = drawn.choice(self.corpus.question_starters or [""])
        system = system.replace("{topic}", topic)
        if system not in self._turns:
            self._turns[system] = user_turn(self.tokenizer, self.model, system or None)
        digest = hashlib.sha256(f"question:{self.corpus.seed}:{number}".encode()).digest()
        return _Slot(number, self._turns[system], starter, int.from_bytes(digest[:8], "big") >> 1)

    def _sample(self, slots: list[_Slot], progress: CorpusProgress) -> list[dict[str, Any]]:
        prompts = [
            self.tokenizer.encode(slot.turn.prefix + slot.starter, add_special_tokens=False) for slot in slots
        ]
        sampling = Sampling(
            temperature=self.corpus.self_ask_temperature,
            top_p=self.corpus.self_ask_top_p,
            max_new_tokens=self.corpus.max_question_tokens,
            stop_token_ids=frozenset().union(*(slot.turn.stop_token_ids for slot in slots)),
        )
        jobs = [Job(ids, slot.seed) for ids, slot in zip(prompts, slots, strict=True)]
        results = self.generator.generate(jobs, sampling, progress.tokens)
        return [
            self._row(slot, ids, result, sampling.stop_token_ids)
            for slot, ids, result in zip(slots, prompts, results, strict=True)
        ]

    def _row(self, slot: _Slot, ids: list[int], result: Generation, stops: frozenset[int]) -> dict[str, Any]:
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

    def __init__(
        self, corpus: CorpusConfig, tokenizer: PreTrainedTokenizerBase, accounting: Accounting
    ) -> None:
        self.corpus, self.tokenizer, self.accounting = corpus, tokenizer, accounting
        self.duplicates = DuplicateFilter()
        self.seen: set[str] = set()
        self.prompts: list[Prompt] = []

    def consider(self, row: dict[str, Any]) -> None:
        """Count the row as requested, and keep it or count why not."""
        self.accounting.num_requested += 1
        name = f"{SOURCE}:{row['slot']}"
        try:
            self.prompts.append(self._prompt(row, name))
        except SkippedRow as skipped:
            self.accounting.skip(str(skipped), name)

    def _prompt(self, row: dict[str, Any], name: str) -> Prompt:
        if len(self.prompts) == self.corpus.num_prompts:
            raise SkippedRow("surplus")
        if row["finish_reason"] != "stop":
            raise SkippedRow("question_cut" if row["finish_reason"] == "length" else row["finish_reason"])
        if row["num_tokens"] < self.corpus.min_question_tokens:
            raise SkippedRow("question_too_short")
        duplicate = self.duplicates.reason(row["text"])
        if duplicate is not None:
            raise SkippedRow(duplicate)
        prompt = make_prompt(row_ids(row["text"], self.tokenizer, chat=True), source=SOURCE, row=name)
        return admit(prompt, self.seen, max_tokens=self.corpus.max_prompt_tokens)
