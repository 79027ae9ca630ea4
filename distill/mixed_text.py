"""trl.DistillationTrainer on corpus rows: token ids in, and a mixture of the draft's text and the target's.

trl's trainer takes texts or messages and always trains on what the student writes. Here a row's prompt is its token ids,
never tokenized again, and a row is trained either on tokens that the draft writes or on the target's answer from the corpus
(`lmbda` of GKD, Agarwal et al. 2023, which trl has dropped).
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PrinterCallback
from trl import DistillationConfig, DistillationTrainer


class MixedTextTrainer(DistillationTrainer):
    """DistillationTrainer whose rows are `prompt_token_ids` and `response_token_ids`, with trl's own loss.

    Args:
        lmbda: gives the share of rows that the draft writes, at the moment; the others are the corpus answers, cut so that
            prompt and answer have at most `max_sequence_tokens` inputs.
        continue_answers: the draft goes on from a random place of the target's answer rather than from the prompt, as it does
            when it serves: there, all but the last few tokens before its own are the target's.
        tokenizer: only its special ids are read.
    """

    def __init__(
        self,
        draft: PreTrainedModel,
        rows: Dataset,
        *,
        args: DistillationConfig,
        tokenizer: PreTrainedTokenizerBase,
        lmbda: Callable[[], float],
        max_sequence_tokens: int,
        continue_answers: bool = True,
        target: PreTrainedModel | None = None,
        callbacks: Sequence[Any] = (),
    ) -> None:
        self.lmbda, self.continue_answers, self.max_sequence_tokens = lmbda, continue_answers, max_sequence_tokens
        self.random = np.random.default_rng(args.seed)
        self.answers: list[list[int] | None] = []
        self.num_supervised_tokens = 0
        config = draft.config.get_text_config()
        pad_ids = config.pad_token_id, draft.generation_config.pad_token_id
        prompts = corpus_prompts(rows, max_sequence_tokens)
        # The trainer drops rows that do not fill a batch: of fewer rows than one batch it would train on none.
        args.per_device_train_batch_size = min(args.per_device_train_batch_size, len(prompts))
        super().__init__(
            model=draft,
            teacher_model=target,
            args=args,
            train_dataset=prompts,
            # A copy: the trainer sets a pad token where there is none.
            processing_class=copy.deepcopy(tokenizer),
            callbacks=list(callbacks),
        )
        self.remove_callback(PrinterCallback)
        # The draft is saved with the config that it came with: Trainer.train would put the tokenizer's ids into it.
        self.processing_class = None
        config.pad_token_id, draft.generation_config.pad_token_id = pad_ids

    def _tokenize_prompts(self, prompts: list[dict[str, list[int]]]) -> tuple[list[list[int]], None, dict[str, Any]]:
        """The rows' token ids as they are, and in `answers` what needs no writing (None: the draft writes it)."""
        inputs: list[list[int]] = []
        self.answers = []
        for prompt in prompts:
            ids, answer = list(prompt["prompt_token_ids"]), list(prompt["response_token_ids"])
            answer = answer[: self.max_sequence_tokens - len(ids) + 1]
            if self.random.random() >= self.lmbda():
                self.answers.append(answer)
            else:
                # Never from the answer's end: after EOS there is nothing to go on with.
                num_given = int(self.random.integers(len(answer))) if self.continue_answers else 0
                ids += answer[:num_given]
                self.answers.append(None)
            inputs.append(ids)
        return inputs, None, {}

    def _generate_single_turn(
        self, prompt_ids: list[list[int]], images: Any, multimodal_fields: dict[str, Any], has_tool_images: bool = False
    ) -> list[list[int]]:
        """Completions in row order: the corpus answers, and what the draft writes for the rows without one."""
        empty = [index for index, answer in enumerate(self.answers) if answer is None]
        written: list[list[int]] = []
        if empty:
            written = self.write([prompt_ids[index] for index in empty])
        remaining = iter(written)
        completions = [next(remaining) if answer is None else answer for answer in self.answers]
        self.num_supervised_tokens += sum(map(len, completions))
        return completions

    def write(self, prompt_ids: list[list[int]]) -> list[list[int]]:
        """Tokens that the draft samples after each prompt, up to and including EOS."""
        completions: list[list[int]] = super()._generate_single_turn(prompt_ids, None, {})
        return completions

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        raise AssertionError("no trainer checkpoints here")


def corpus_prompts(rows: Dataset, max_sequence_tokens: int) -> Dataset:
    """Corpus rows as the `prompt` column that trl asks for; rows whose prompt leaves no room, or without answer, are left out."""
    columns = ["prompt_token_ids", "response_token_ids"]
    kept = [
        index
        for index, row in enumerate(rows.select_columns(columns).with_format("numpy"))
        if len(row[columns[1]]) > 0 and 0 < len(row[columns[0]]) <= max_sequence_tokens
    ]
    if not kept:
        raise ValueError(
            f"train.max_sequence_tokens={max_sequence_tokens}: no training row of {len(rows)} has a prompt within it; raise it"
        )

    def as_prompts(batch: dict[str, list[list[int]]]) -> dict[str, list[dict[str, list[int]]]]:
        pairs = zip(batch[columns[0]], batch[columns[1]], strict=True)
        return {"prompt": [dict(zip(columns, pair, strict=True)) for pair in pairs]}

    return rows.select(kept).select_columns(columns).with_transform(as_prompts)
