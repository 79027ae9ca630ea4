"""The target's answers, shard by shard: which rows lie in which shard follows from the prompts alone."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

import pyarrow as pa

from pipeline.corpus.accounting import Accounting
from pipeline.corpus.generate import Generation, Generator, Job, Sampling
from pipeline.corpus.progress import CorpusProgress
from pipeline.corpus.prompts import Prompt
from pipeline.corpus.shards import ANSWER_SCHEMA, ShardFolder, nested_topk
from pipeline.schema import CorpusConfig

_FAILED_KEY = b"draftsmith.failed"


@dataclass(frozen=True)
class ShardPlan:
    """The rows of one shard: one temperature, prompts of like length."""

    index: int
    temperature: float
    prompts: tuple[Prompt, ...]
    seeds: tuple[int, ...]


def plan_shards(prompts: Sequence[Prompt], corpus: CorpusConfig) -> list[ShardPlan]:
    """Deal the temperatures out over the prompts in turn, then cut each temperature's prompts, longest first."""
    plans: list[ShardPlan] = []
    num_temperatures = len(corpus.temperatures)
    for offset, temperature in enumerate(corpus.temperatures):
        mine = sorted(
            prompts[offset::num_temperatures], key=lambda prompt: (-len(prompt.token_ids), prompt.prompt_id)
        )
        for start in range(0, len(mine), corpus.shard_rows):
            chunk = tuple(mine[start : start + corpus.shard_rows])
            seeds = tuple(row_seed(corpus.seed, prompt, temperature) for prompt in chunk)
            plans.append(ShardPlan(len(plans), temperature, chunk, seeds))
    return plans


def row_seed(seed: int, prompt: Prompt, temperature: float) -> int:
    """A row's own seed (63 bits), from the corpus's seed and the row's content."""
    digest = hashlib.sha256(f"answer:{seed}:{prompt.prompt_id}:{temperature}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def write_answers(
    plans: Sequence[ShardPlan],
    folder: Path,
    *,
    generator: Generator,
    corpus: CorpusConfig,
    stop_token_ids: frozenset[int],
    accounting: Accounting,
    progress: CorpusProgress,
) -> None:
    """Generate and write the shards that are not there yet, and account for the rows of all.

    Raises:
        ValueError: a shard cannot be written.
    """
    shards = ShardFolder(folder, ANSWER_SCHEMA)
    num_rows = sum(len(plan.prompts) for plan in plans)
    progress.start("answers", num_rows=num_rows, max_tokens_per_row=corpus.max_new_tokens)
    for plan in plans:
        table = _finished(shards.read(plan.index), plan)
        reused = table is not None
        if table is None:
            sampling = Sampling(plan.temperature, corpus.max_new_tokens, stop_token_ids, topk=corpus.topk)
            jobs = [
                Job(prompt.token_ids, seed) for prompt, seed in zip(plan.prompts, plan.seeds, strict=True)
            ]
            table = _table(plan, generator.generate(jobs, sampling, progress.tokens))
            shards.write_table(plan.index, table)
        _account(table, plan, accounting)
        progress.rows_done(len(plan.prompts), reused=reused)


def _finished(table: Optional[pa.Table], plan: ShardPlan) -> Optional[pa.Table]:
    """The shard, if it holds the plan's rows and no others."""
    if table is None:
        return None
    failed = _failed(table)
    expected = [prompt.prompt_id for prompt in plan.prompts if prompt.prompt_id not in failed]
    same = table.column("prompt_id").to_pylist() == expected
    return table if same and set(failed) <= {prompt.prompt_id for prompt in plan.prompts} else None


def _table(plan: ShardPlan, results: Sequence[Generation]) -> pa.Table:
    rows = [row for row in zip(plan.prompts, plan.seeds, results, strict=True) if row[2].failure is None]
    failed = {
        p.prompt_id: r.failure for p, r in zip(plan.prompts, results, strict=True) if r.failure is not None
    }
    lengths = [len(result.token_ids) for _, _, result in rows]
    columns = {
        "prompt_id": [prompt.prompt_id for prompt, _, _ in rows],
        "source": [prompt.source for prompt, _, _ in rows],
        "prompt_token_ids": [list(prompt.token_ids) for prompt, _, _ in rows],
        "response_token_ids": [result.token_ids for _, _, result in rows],
        "finish_reason": [result.finish_reason for _, _, result in rows],
        "temperature": [plan.temperature] * len(rows),
        "seed": [seed for _, seed, _ in rows],
    }
    arrays = [pa.array(values, type=ANSWER_SCHEMA.field(name).type) for name, values in columns.items()]
    # Without stored candidates each response token still has its (empty) list.
    ids = [result.topk_ids for _, _, result in rows if result.topk_ids is not None]
    logprobs = [result.topk_logprobs for _, _, result in rows if result.topk_logprobs is not None]
    arrays += [nested_topk(ids, pa.int32(), lengths), nested_topk(logprobs, pa.float16(), lengths)]
    return pa.Table.from_arrays(
        arrays, schema=ANSWER_SCHEMA.with_metadata({_FAILED_KEY: json.dumps(failed).encode()})
    )


def _failed(table: pa.Table) -> dict[str, str]:
    failed: dict[str, str] = json.loads((table.schema.metadata or {}).get(_FAILED_KEY, b"{}"))
    return failed


def _account(table: pa.Table, plan: ShardPlan, accounting: Accounting) -> None:
    lengths = zip(
        table.column("finish_reason").to_pylist(),
        pa.compute.list_value_length(table.column("prompt_token_ids")).to_pylist(),
        pa.compute.list_value_length(table.column("response_token_ids")).to_pylist(),
        strict=True,
    )
    for finish_reason, num_prompt_tokens, num_response_tokens in lengths:
        accounting.write(
            finish_reason=finish_reason,
            num_prompt_tokens=num_prompt_tokens,
            num_response_tokens=num_response_tokens,
        )
    failed = _failed(table)
    for prompt in plan.prompts:
        if prompt.prompt_id in failed:
            accounting.fail(failed[prompt.prompt_id], prompt.row)
