"""The eval stage: how often the target accepts the draft, before and after distillation, on text that was held out."""

from dataclasses import asdict

from eval.acceptance import teacher_forced_acceptance
from eval.acceptance_table import AcceptanceTable, paired_difference
from eval.plots import acceptance_figure
from pipeline.context import StageContext
from pipeline.drafts import load_drafts
from pipeline.held_out import corpus_parts
from pipeline.models import load_causal_lm
from pipeline.store import write_json


def run_eval(context: StageContext) -> dict[str, object]:
    """Write `acceptance.json`: `acceptance_rate` rows with intervals, the gain of distillation, and the course over the response."""
    settings = context.config.eval
    target = load_causal_lm(context.target.path, dtype=context.config.target.dtype,
                            trust_remote_code=context.config.target.trust_remote_code)
    tables = teacher_forced_acceptance(
        target, load_drafts(context), corpus_parts(context).test, temperatures=settings.temperatures, samplers=settings.samplers,
        max_prompts=settings.max_prompts, batch_tokens=settings.batch_tokens)
    rows = [acceptance_row(table, num_bootstrap=settings.num_bootstrap, seed=settings.seed) for table in tables]
    gains = distillation_gains(tables, num_bootstrap=settings.num_bootstrap, seed=settings.seed)
    by_position = [{**_key(table), "ranges": table.by_position()} for table in tables]
    write_json(context.work_dir / "acceptance.json", {"acceptance_rate": rows, "distillation_gain": gains, "by_position": by_position})
    context.tracker.log_figure(acceptance_figure(rows), "acceptance.png")
    return {f"acceptance_rate_{row['draft']}_t{row['temperature']:g}_{row['sampler']}": row["value"] for row in rows}


def acceptance_row(table: AcceptanceTable, *, num_bootstrap: int, seed: int) -> dict[str, object]:
    """One `acceptance_rate` with its 95% interval over prompts."""
    interval = table.rate(num_bootstrap=num_bootstrap, seed=seed)
    return {**_key(table), **asdict(interval), "num_positions": int(table.counts.sum()), "num_prompts": len(table.prompt_ids)}


def distillation_gains(tables: list[AcceptanceTable], *, num_bootstrap: int, seed: int) -> list[dict[str, object]]:
    """distilled - undistilled on the same prompts, per temperature and sampler."""
    of_draft = {(table.draft, table.temperature, table.sampler): table for table in tables}
    gains: list[dict[str, object]] = []
    for (draft, temperature, sampler), table in of_draft.items():
        if draft == "distilled":
            before = of_draft["undistilled", temperature, sampler]
            interval = paired_difference(table, before, num_bootstrap=num_bootstrap, seed=seed)
            gains.append({"temperature": temperature, "sampler": sampler, **asdict(interval)})
    return gains


def _key(table: AcceptanceTable) -> dict[str, object]:
    return {"draft": table.draft, "temperature": table.temperature, "sampler": table.sampler}
