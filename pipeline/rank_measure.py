"""The figures of a ranking: acceptance, cost, predicted and measured speedup of each draft that can be measured."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from eval.acceptance_summary import Resampling, rate_row
from eval.acceptance_table import AcceptanceTable
from eval.bench_conditions import BackendFactory, Condition
from eval.bench_measure import measure
from eval.bench_rows import bench_row, strongest_baseline
from eval.config import PLAIN_BACKENDS
from eval.draft_verdict import DraftVerdict, judge_draft
from eval.head import Head
from eval.rounds import expected_rounds
from eval.teacher_forced import teacher_forced_acceptance
from eval.teacher_forcing import Draft
from eval.theory import StepTimes
from eval.timing import measure_step_times
from pipeline.bench_prompts import prompt_room
from pipeline.eval_rows import EvalRows
from pipeline.rank_candidates import Candidate
from pipeline.schema import Config
from specdec_runtime.forward import ModelRunner

Row = dict[str, Any]
MAX_TIMING_SECONDS = 20.0
DEFAULT_MAX_MINUTES = 5.0


@dataclass(frozen=True)
class Outlook:
    """What is known of a draft before it is timed decoding."""

    acceptance: list[Row]
    times: StepTimes
    verdict: DraftVerdict


def measurable(
    config: Config, target: PreTrainedModel, candidates: Sequence[Candidate], measured: EvalRows
) -> dict[str, Draft]:
    """The drafts that can be measured beside each other, by name. What one of them shows only now becomes its reason: an architecture
    that the engine or the measurement cannot use, or a context that would leave all the others short texts only (SpecForge 271)."""
    drafts = {}
    for candidate in candidates:
        if candidate.draft is not None and candidate.compatible:
            try:
                _require_measurable(config, target, candidate.draft, measured)
            except ValueError as error:
                candidate.reasons.append(str(error))
            else:
                drafts[candidate.name] = candidate.draft
    return drafts


def _require_measurable(config: Config, target: PreTrainedModel, draft: Draft, measured: EvalRows) -> None:
    model = draft.model
    ModelRunner(model, "draft")
    Head(model, min(target.config.get_text_config().vocab_size, model.config.get_text_config().vocab_size), draft.vocab_ids)
    num_new_tokens = max(config.bench.max_new_tokens, config.eval.decoded_tokens if config.eval.num_viewer_prompts else 0)
    needed = {
        "answers with their prompts": [len(row["prompt_token_ids"]) + len(row["response_token_ids"]) for row in measured.rows],
        f"prompts with {num_new_tokens} new tokens": [len(ids) + num_new_tokens for ids in measured.prompts.values()],
    }
    contexts = [prompt_room([one], num_new_tokens=0) for one in (target, model)]
    for what, lengths in needed.items():
        num_target, num_draft = (sum(length <= context for length in lengths) for context in contexts)
        if 2 * num_draft < num_target:
            raise ValueError(
                f"its context of {contexts[1]} tokens holds {num_draft} of the {num_target} {what} that the target's holds: rank it "
                "alone, on shorter text"
            )


def outlooks(
    config: Config,
    target: PreTrainedModel,
    drafts: Mapping[str, Draft],
    measured: EvalRows,
    *,
    num_token_ids: int | None,
) -> dict[str, Outlook]:
    """Acceptance on the same text, step times, and what follows from both at the lowest of `bench.temperatures`."""
    settings, sampler = config.eval, config.runtime.sampler
    temperatures = sorted({*settings.temperatures, min(config.bench.temperatures)})
    tables = teacher_forced_acceptance(
        target,
        drafts,
        measured.rows,
        temperatures=temperatures,
        samplers=[sampler],
        max_prompts=settings.max_prompts,
        batch_tokens=settings.batch_tokens,
        num_token_ids=num_token_ids,
    )
    resampling, temperature = Resampling(settings.num_bootstrap, settings.seed), min(config.bench.temperatures)
    result = {}
    for name, draft in drafts.items():
        own = [table for table in tables if table.draft == name]
        times = step_times(config, target, draft)
        (deciding,) = (table for table in own if table.temperature == temperature)
        verdict = judge_draft(tau_by_gamma(deciding, times.max_gamma), times)
        result[name] = Outlook([rate_row(table, resampling) for table in own], times, verdict)
    return result


def tau_by_gamma(table: AcceptanceTable, max_gamma: int) -> dict[int, float]:
    """Tokens per target forward that the text promises, for gamma 1..max_gamma."""
    result = {}
    for gamma in range(1, max_gamma + 1):
        rounds = expected_rounds(table, gamma)
        # Per round, as the step times are: the prefill's forward and token are not in it.
        decoded, num_rounds = float((rounds.num_tokens - 1).sum()), float(rounds.num_rounds.sum())
        result[gamma] = decoded / num_rounds if num_rounds else 1.0
    return result


def step_times(config: Config, target: PreTrainedModel, draft: Draft) -> StepTimes:
    """T(1..gamma+1) and T_draft under the settings of the preflight."""
    return measure_step_times(
        target,
        draft.model,
        max_gamma=config.preflight.max_gamma,
        context_tokens=config.preflight.context_tokens,
        num_repeats=config.preflight.num_repeats,
        draft_vocab_ids=draft.vocab_ids,
        max_seconds=MAX_TIMING_SECONDS,
        runtime=config.runtime,
    )


def gammas_to_measure(verdict: DraftVerdict, max_gamma: int) -> list[int]:
    """The predicted best and its neighbours; 1; and both sides of where paying ends: so that the clock can say no to any of it."""
    longest = max(verdict.paying_gammas, default=1)
    wanted = {verdict.best_gamma - 1, verdict.best_gamma, verdict.best_gamma + 1, longest, longest + 1}
    return sorted({1, *(gamma for gamma in wanted if 1 <= gamma <= max_gamma)})


def measure_speedups(
    config: Config,
    target: PreTrainedModel,
    drafts: Mapping[str, Draft],
    verdicts: Mapping[str, DraftVerdict],
    prompts: Sequence[Sequence[int]],
) -> list[Row]:
    """Bench rows of plain decoding and of each draft at its gammas, in alternation, at the lowest temperature, batch 1."""
    bench = config.bench
    temperature = min(bench.temperatures)
    plain = [backend for backend in bench.backends if backend in PLAIN_BACKENDS]
    conditions = [Condition(backend, "none", 0, temperature, 1) for backend in plain]
    for name, verdict in verdicts.items():
        conditions += [
            Condition("native", name, gamma, temperature, 1)
            for gamma in gammas_to_measure(verdict, config.preflight.max_gamma)
        ]
    factory = BackendFactory(target, drafts, config.runtime)
    minutes = DEFAULT_MAX_MINUTES if bench.max_minutes is None else bench.max_minutes
    measurements = measure(
        factory, conditions, prompts[: bench.num_prompts], bench, deadline_s=time.perf_counter() + 60 * minutes
    )
    baseline = strongest_baseline(measurements)
    return [bench_row(m, baseline, num_bootstrap=bench.num_bootstrap, seed=bench.seed) for m in measurements]
