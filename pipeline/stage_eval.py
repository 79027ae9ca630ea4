"""The eval stage: how often the target accepts the draft, before and after distillation, on text that was held out."""

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedModel

from eval.acceptance import NO_WARPER, Warper
from eval.acceptance_plots import calibration_figure, domain_figure, range_figure, tau_figure
from eval.acceptance_summary import (
    Entry,
    Resampling,
    breakdown,
    decoded_row,
    paired_differences,
    rate_row,
    rounds_row,
)
from eval.acceptance_table import AcceptanceTable
from eval.config import EvalConfig
from eval.decoded_acceptance import decoded_acceptance
from eval.plots import acceptance_figure
from eval.teacher_forced import teacher_forced_acceptance
from eval.teacher_forcing import Draft
from pipeline.context import StageContext, load_target
from pipeline.drafts import load_drafts
from pipeline.eval_rows import EvalRows, eval_rows, fitting
from pipeline.prompt_sums import prompt_sums
from pipeline.stage_medusa import run_heads_eval
from pipeline.store import write_json
from pipeline.tracker import Tracker
from pipeline.viewer import VIEWER_FILE, viewer_page


def run_eval(context: StageContext) -> dict[str, object]:
    """Write `acceptance.json` and the token viewer, `viewer.html`; for Medusa heads see `run_heads_eval`.

    `acceptance_rate` has rows with intervals, without a warper; the other keys hold what it hangs on.
    """
    settings, config = context.config.eval, context.config
    if config.draft.init_is_medusa:
        return run_heads_eval(context)
    target = load_target(context)
    drafts, measured = load_drafts(context), eval_rows(context, target)
    tables = teacher_forced_acceptance(
        target,
        drafts,
        measured.rows,
        temperatures=settings.temperatures,
        samplers=settings.samplers,
        warpers=warpers_of(settings),
        max_prompts=settings.max_prompts,
        batch_tokens=settings.batch_tokens,
    )
    resampling = Resampling(settings.num_bootstrap, settings.seed)
    plain = [table for table in tables if table.warper == NO_WARPER.name]
    rows = [rate_row(table, resampling) for table in plain]
    result: dict[str, Any] = {
        "acceptance_rate": rows,
        "measured_on": measured.name,
        "distillation_gain": paired_differences(plain, "undistilled", resampling),
        "by_warper": [rate_row(table, resampling) for table in tables if table.warper != NO_WARPER.name],
        "breakdown": [breakdown(table, resampling) for table in plain],
        "rounds": [rounds_row(table, settings.max_gamma, resampling) for table in plain],
        "decoded": decode_some(target, drafts, measured, settings, tables),
        "by_prompt": [prompt_sums(table) for table in plain],
    }
    write_json(context.work_dir / "acceptance.json", result)
    log_acceptance_figures(context.tracker, result)
    if settings.num_viewer_prompts:
        page = viewer_page(config, context.target, target, drafts, measured.prompts.values())
        (context.work_dir / VIEWER_FILE).write_text(page, encoding="utf-8")
        context.tracker.log_text(page, VIEWER_FILE)
    return {f"acceptance_rate_{r['draft']}_t{r['temperature']:g}_{r['sampler']}": r["value"] for r in rows}


def warpers_of(settings: EvalConfig) -> list[Warper]:
    """None first, then those of `eval.warpers`.

    Raises:
        ValueError: a value out of range.
    """
    return [NO_WARPER, *(Warper(w.top_k, w.top_p, w.min_p) for w in settings.warpers)]


def decode_some(
    target: PreTrainedModel,
    drafts: dict[str, Draft],
    measured: EvalRows,
    settings: EvalConfig,
    tables: Sequence[AcceptanceTable],
) -> list[Entry]:
    """Real decoding with the longest gamma, for the first sampler, beside what the text says.

    Like is compared with like: the same prompts, and as many tokens of each answer.
    """
    rows: list[Entry] = []
    for temperature in dict.fromkeys(settings.temperatures) if settings.num_decoded_prompts else ():
        fit = fitting(
            measured.prompts_at(temperature).values(),
            [target, *(draft.model for draft in drafts.values())],
            num_new_tokens=settings.decoded_tokens,
            field="eval.decoded_tokens",
        )
        chosen = fit[: settings.num_decoded_prompts]
        prompt_ids = {name for name, ids in measured.prompts.items() if ids in chosen}
        decoded = decoded_acceptance(
            target,
            drafts,
            chosen,
            temperature=temperature,
            gamma=settings.max_gamma,
            sampler=settings.samplers[0],
            max_new_tokens=settings.decoded_tokens,
            seed=settings.seed,
        )
        alike = [table.restricted(prompt_ids, settings.decoded_tokens) for table in tables if table.temperature == temperature]
        resampling = Resampling(settings.num_bootstrap, settings.seed)
        rows += [decoded_row(one, alike, resampling) for one in decoded]
    return rows


def log_acceptance_figures(tracker: Tracker, result: Mapping[str, Any]) -> None:
    """Acceptance by draft, domain, position and entropy, its calibration, and tau, per temperature."""
    tracker.log_figure(acceptance_figure(result["acceptance_rate"]), "acceptance.png")
    sampler = result["acceptance_rate"][0]["sampler"]
    for temperature in dict.fromkeys(row["temperature"] for row in result["acceptance_rate"]):

        def chosen(name: str, temperature: float = temperature) -> list[Entry]:
            return [e for e in result[name] if e["temperature"] == temperature and e["sampler"] == sampler]

        at, parts = f"temperature {temperature:g}, {sampler}", chosen("breakdown")
        figures = {
            "by_domain": domain_figure(parts, title=f"Acceptance by domain, {at} (95% interval)"),
            "by_position": range_figure(
                parts, "by_position", xlabel="position in the response", title=f"Acceptance along the response, {at}"
            ),
            "by_entropy": range_figure(
                parts, "by_entropy", xlabel="the target's entropy (nats)", title=f"Acceptance by the target's entropy, {at}"
            ),
            "calibration": calibration_figure(parts, title=f"Calibration of the draft's confidence, {at}"),
            "tau": tau_figure(chosen("rounds"), title=f"Tokens per target forward, worked out from the text, {at}"),
        }
        for name, figure in figures.items():
            tracker.log_figure(figure, f"acceptance_{name}_t{temperature:g}.png")
