"""The corpus stage: prompts, then the target's answers, then the accounting."""

import hashlib
import json
import os
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from pipeline.context import StageContext
from pipeline.corpus.accounting import Accounting
from pipeline.corpus.answers import ShardPlan, plan_shards, write_answers
from pipeline.corpus.chat import stop_ids
from pipeline.corpus.generate import Generator, TransformersGenerator
from pipeline.corpus.progress import CorpusProgress
from pipeline.corpus.prompts import Prompt, check_prompts, file_prompts
from pipeline.corpus.questions import QuestionMaker
from pipeline.corpus.read import SHARDS
from pipeline.models import load_causal_lm, load_tokenizer
from pipeline.schema import Config

QUESTIONS = "questions"


def run_corpus(context: StageContext) -> dict[str, object]:
    """Write `questions/`, `shards/` and `corpus.json` into the work folder; return the figures.

    A folder that a killed run left is taken up: finished shards are kept, and the result is the one that an undisturbed
    run gives.

    Raises:
        ValueError: prompts that cannot be used, lengths beyond the target's context, a folder that cannot be written.
    """
    config, folder = context.config, context.work_dir
    tokenizer = load_tokenizer(context.target.path, context.target.trust_remote_code)
    check_prompts(config, tokenizer)
    model = load_causal_lm(context.target.path, config.target.dtype, context.target.trust_remote_code)
    check_sizes(config, model)
    generator = TransformersGenerator(model, batch_size=config.corpus.batch_size)
    accounting = Accounting()
    with CorpusProgress() as progress:
        prompts = collect_prompts(config, folder, tokenizer, model, generator, accounting, progress)
        plans = plan_shards(prompts, config.corpus)
        write_answers(
            plans,
            folder / SHARDS,
            generator=generator,
            corpus=config.corpus,
            stop_token_ids=stop_ids(model, tokenizer),
            accounting=accounting,
            progress=progress,
        )
        speed = progress.tokens_per_second if progress.num_tokens else None
    record = {**accounting.to_dict(), "backend": generator.name, "target_revision": context.target.revision}
    _write_json(folder / "corpus.json", record)
    if accounting.num_written == 0:
        raise ValueError(
            f"The target gave no answer that could be kept: {dict(accounting.failed)} of {len(prompts)} prompts"
        )
    context.tracker.log_corpus(
        folder, digest=corpus_digest(plans, context.target.revision), num_rows=accounting.num_written
    )
    return _figures(accounting, speed)


def collect_prompts(
    config: Config,
    folder: Path,
    tokenizer: PreTrainedTokenizerBase,
    model: PreTrainedModel,
    generator: Generator,
    accounting: Accounting,
    progress: CorpusProgress,
) -> list[Prompt]:
    """The user's prompts, or the target's own questions."""
    if config.corpus.prompts is not None:
        return file_prompts(config, tokenizer, accounting)
    return QuestionMaker(config.corpus, tokenizer, model, generator).make(
        folder / QUESTIONS, accounting, progress
    )


def check_sizes(config: Config, model: PreTrainedModel) -> None:
    """Refuse lengths beyond the target's context and more stored candidates than it has tokens.

    Raises:
        ValueError: names the fields and the largest sum.
    """
    corpus, text_config = config.corpus, model.config.get_text_config()
    context_tokens = getattr(text_config, "max_position_embeddings", None)
    if context_tokens is not None and corpus.max_prompt_tokens + corpus.max_new_tokens > context_tokens:
        raise ValueError(
            f"corpus.max_prompt_tokens={corpus.max_prompt_tokens} and corpus.max_new_tokens={corpus.max_new_tokens} exceed the "
            f"target's context of {context_tokens} tokens together: lower one of them"
        )
    if corpus.topk > text_config.vocab_size:
        raise ValueError(f"corpus.topk={corpus.topk}: the target has only {text_config.vocab_size} tokens")


def corpus_digest(plans: list[ShardPlan], target_revision: str) -> str:
    """Sha256 over what decides the rows: who answered, which prompts, at which temperature and seed."""
    digest = hashlib.sha256(target_revision.encode())
    for plan in plans:
        for prompt, seed in zip(plan.prompts, plan.seeds, strict=True):
            digest.update(f"{prompt.prompt_id}:{plan.temperature}:{seed}\n".encode())
    return digest.hexdigest()


def _figures(accounting: Accounting, tokens_per_second: float | None) -> dict[str, object]:
    figures: dict[str, object] = {
        "num_requested": accounting.num_requested,
        "num_written": accounting.num_written,
        "num_skipped": accounting.skipped.total(),
        "num_failed": accounting.failed.total(),
        "num_stop": accounting.finish_reason["stop"],
        "num_truncated": accounting.finish_reason["length"],
        "num_response_tokens": accounting.num_response_tokens,
    }
    if tokens_per_second is not None:
        figures["tokens_per_second"] = round(tokens_per_second, 1)
    return figures


def _write_json(path: Path, record: dict[str, object]) -> None:
    temporary = path.with_suffix(".tmp")
    try:
        temporary.write_text(json.dumps(record, indent=2) + "\n")
        os.replace(temporary, path)
    except OSError as error:
        raise ValueError(f"{str(path)!r} cannot be written: {error.strerror or error}") from error
