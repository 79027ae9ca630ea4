"""What acceptance is measured on: held-out answers of the corpus, or the target's answers to a file of prompts."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from pipeline.bench_prompts import file_prompts, prompt_room
from pipeline.context import StageContext
from pipeline.held_out import corpus_parts
from pipeline.models import ModelRef, load_tokenizer
from pipeline.schema import Config
from specdec_runtime import DecoderConfig, Request, SpeculativeDecoder

ANSWER_BATCH = 16
COLUMNS = (
    "prompt_id",
    "source",
    "domain",
    "prompt_token_ids",
    "response_token_ids",
    "finish_reason",
    "temperature",
)
Row = Mapping[str, Any]


@dataclass(frozen=True)
class EvalRows:
    """`rows` as in the corpus. `prompts`: the distinct ones among them, by id, in order, for what is decoded anew."""

    name: str
    rows: Iterable[Row]
    prompts: dict[str, list[int]]

    def prompts_at(self, temperature: float) -> dict[str, list[int]]:
        """The prompts whose answers were sampled at this temperature, or all of them if none was."""
        at = {row["prompt_id"] for row in self.rows if abs(row["temperature"] - temperature) < 1e-4}
        return {name: ids for name, ids in self.prompts.items() if name in at} or self.prompts


def eval_rows(context: StageContext, target: PreTrainedModel) -> EvalRows:
    """The rows of `eval.prompts`, answered by the target, or the corpus's test part.

    Raises:
        ValueError: no prompt of the file can be used, or the corpus leaves no rows.
    """
    if context.config.eval.prompts is not None:
        return answered_rows(context.config, context.target, target)
    test = corpus_parts(context).test
    # The teacher's log-probabilities are most of a corpus, and are not looked at here.
    rows = test.select_columns([name for name in COLUMNS if name in test.column_names])
    return EvalRows("held-out answers of the corpus", rows, distinct_prompts(rows))


def answered_rows(config: Config, reference: ModelRef, target: PreTrainedModel) -> EvalRows:
    """The prompts of `eval.prompts` with the target's own answers at each of `eval.temperatures`."""
    settings = config.eval
    assert settings.prompts is not None
    chosen = file_prompts(
        settings.prompts,
        load_tokenizer(reference.path, reference.trust_remote_code),
        chat=config.target.chat,
        num_prompts=settings.num_prompts,
        max_tokens=prompt_room([target], num_new_tokens=max(settings.max_new_tokens, settings.decoded_tokens)),
        field="eval.prompts",
    )
    rows: list[Row] = []
    for temperature in dict.fromkeys(settings.temperatures):
        answers = answer(
            target, chosen.prompts, temperature=temperature, max_new_tokens=settings.max_new_tokens, seed=settings.seed
        )
        for index, (prompt, row) in enumerate(zip(chosen.prompts, answers, strict=True)):
            identity = {"prompt_id": f"{chosen.names[index]}#{index}", "source": chosen.name}
            rows.append({**identity, "domain": chosen.category_of[index], "prompt_token_ids": prompt, **row})
    return EvalRows(chosen.name, rows, distinct_prompts(rows))


def answer(
    target: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    *,
    temperature: float,
    max_new_tokens: int,
    seed: int,
) -> list[Row]:
    """The target's answers by plain decoding: `response_token_ids`, `finish_reason` and `temperature`."""
    decoder = SpeculativeDecoder(target, config=DecoderConfig(max_batch_size=min(ANSWER_BATCH, len(prompts))))
    outputs = decoder.generate(
        [
            Request(list(prompt), max_new_tokens=max_new_tokens, temperature=temperature, seed=seed + index)
            for index, prompt in enumerate(prompts)
        ]
    )
    return [
        {"response_token_ids": o.token_ids, "finish_reason": o.finish_reason, "temperature": temperature}
        for o in outputs
    ]


def distinct_prompts(rows: Iterable[Row]) -> dict[str, list[int]]:
    """Each prompt once, by its id, in the rows' order."""
    first: dict[str, list[int]] = {}
    for row in rows:
        first.setdefault(row["prompt_id"], list(row["prompt_token_ids"]))
    return first


def fitting(
    prompts: Iterable[list[int]], models: Iterable[PreTrainedModel], *, num_new_tokens: int, field: str
) -> list[list[int]]:
    """The prompts that leave room for the answer in every model's context.

    Raises:
        ValueError: there is none; `field` is the setting that asks for so many new tokens.
    """
    room = prompt_room(models, num_new_tokens=num_new_tokens)
    chosen = [ids for ids in prompts if len(ids) <= room]
    if not chosen:
        raise ValueError(
            f"{field}={num_new_tokens}: no prompt leaves room for it in a context of {room + num_new_tokens} tokens; lower it"
        )
    return chosen
