"""The first stage: can a draft of this shape pay on this device, and what will the run need?

Nothing is trained yet, so acceptance is unknown. Measured are the step times: the target over 1, 2, ... gamma+1 tokens,
and the draft over one. A draft from the target's layers is timed with copied weights, which cost what trained ones cost.
"""

from dataclasses import asdict, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel

from distill.config import AUTO
from eval.theory import StepTimes
from eval.timing import measure_step_times
from pipeline import compat
from pipeline.compat import WARNING, Finding
from pipeline.context import StageContext
from pipeline.estimates import disk_gib, measure_rates, memory_gib, minutes, num_parameters, weight_bytes
from pipeline.initial_draft import candidate_draft, draft_of_shape
from pipeline.input_checks import check_inputs
from pipeline.models import load_causal_lm, obtain_model
from pipeline.pair import check_start_draft
from pipeline.schema import Config
from pipeline.store import write_json
from pipeline.verdict import Verdict, make_verdict, verdict_table

__all__ = ["check_inputs", "run_preflight"]

MAX_TIMING_SECONDS = 24.0
MAX_INVERSION = 1.25
WHOLE_HEAD_TIMED = (
    f"draft.vocab_shortlist={AUTO}: there is no corpus yet to choose from, so the draft was timed with its whole head; the "
    "distill stage chooses a size and times it, and its draft step will be this or cheaper"
)


def run_preflight(context: StageContext) -> dict[str, object]:
    """Write `verdict.json` and print it; return `pays`, `best_gamma`, `cost_ratio` and the lowest break-even acceptance."""
    config = context.config
    trust = context.target.trust_remote_code
    target = load_causal_lm(context.target.path, config.target.dtype, trust)
    draft = candidate_draft(config, target)
    times = time_pair(
        config, target, draft, max_gamma=config.preflight.max_gamma, max_seconds=MAX_TIMING_SECONDS
    )
    verdict = make_verdict(times, times_by_layers=_times_by_layers(config, target, draft, times))
    memory = memory_gib(config, target, draft)
    findings = [*_pair_findings(context, target, draft), *_memory_findings(memory), *timing_findings(times)]
    disk = disk_gib(config, num_parameters(draft), weight_bytes(draft))
    estimates = minutes(config, measure_rates(config, target, draft))
    write_json(
        context.work_dir / "verdict.json",
        {
            **verdict,
            "findings": [asdict(finding) for finding in findings],
            "memory_gib": memory,
            "disk_gib": disk,
            "estimated_minutes": estimates,
            "device": str(target.device),
            "draft": {
                "num_parameters": num_parameters(draft),
                "num_layers": int(draft.config.get_text_config().num_hidden_layers),
                "vocab_shortlist": config.draft.vocab_shortlist,
            },
        },
    )
    if config.draft.vocab_shortlist == AUTO:
        Console(highlight=False).print(WHOLE_HEAD_TIMED, soft_wrap=True)
    _show(verdict, findings, memory | {f"{name} (disk)": size for name, size in disk.items()}, estimates)
    break_even = [value for value in verdict["break_even_acceptance"].values() if value is not None]
    return {
        "pays": verdict["pays"],
        "best_gamma": verdict["best_gamma"],
        "cost_ratio": verdict["cost_ratio"],
        "lowest_break_even_acceptance": min(break_even, default=None),
    }


def time_pair(
    config: Config, target: PreTrainedModel, draft: PreTrainedModel, *, max_gamma: int, max_seconds: float
) -> StepTimes:
    """T(1..gamma+1) and T_draft, the draft with its head trimmed to `draft.vocab_shortlist` rows; whole with `auto`.

    Which rows is unknown before the corpus is written, and costs the same.
    """
    num_ids = config.draft.shortlist_size
    return measure_step_times(
        target,
        draft,
        max_gamma=max_gamma,
        context_tokens=config.preflight.context_tokens,
        num_repeats=config.preflight.num_repeats,
        draft_vocab_ids=None if num_ids is None else torch.arange(num_ids),
        max_seconds=max_seconds,
    )


def _times_by_layers(
    config: Config, target: PreTrainedModel, draft: PreTrainedModel, times: StepTimes
) -> list[tuple[int, float]]:
    """A second draft of another depth, so that the cost per layer is known; only for drafts made of the target's layers."""
    num_target_layers = int(target.config.get_text_config().num_hidden_layers)
    num_layers = int(draft.config.get_text_config().num_hidden_layers)
    if config.draft.path is not None or num_target_layers < 2:
        return []
    other = 1 if num_layers > 1 else 2
    other_draft = draft_of_shape(replace(config.draft, num_layers=other, keep_layers=None, candidates=None), target)
    other_times = time_pair(config, target, other_draft, max_gamma=1, max_seconds=MAX_TIMING_SECONDS / 4)
    return [(num_layers, times.draft_ms), (other, other_times.draft_ms)]


def _pair_findings(context: StageContext, target: PreTrainedModel, draft: PreTrainedModel) -> list[Finding]:
    """Warnings only: what cannot work was refused by `check_inputs`."""
    settings = compat.read_json(Path(context.target.path) / "generation_config.json")
    findings = compat.check_generation_config(settings, who="target") + compat.check_shapes(draft.config)
    if context.config.draft.path is not None:
        folder = obtain_model(context.config.draft.path, field="draft.path")
        findings += check_start_draft(
            context.target.path, folder, trust_remote_code=context.target.trust_remote_code
        )
    return findings


def _memory_findings(memory: dict[str, float]) -> list[Finding]:
    needed = max(
        memory["training"],
        memory["target_weights"]
        + memory["draft_weights"]
        + memory["target_kv_cache"]
        + memory["draft_kv_cache"]
        + memory["proposals"],
    )
    if needed <= memory["available"]:
        return []
    return [
        Finding(
            "memory",
            WARNING,
            f"about {needed:.1f} GiB of memory are needed and {memory['available']:.1f} GiB are available: take a smaller draft, "
            "a lower runtime.max_batch_size, or a larger machine",
        )
    ]


def timing_findings(times: StepTimes) -> list[Finding]:
    """A forward over more tokens that was clearly faster than one over fewer: the times are not to be trusted."""
    for width, narrow_ms in enumerate(times.target_ms, start=1):
        wide_ms = min(times.target_ms[width:], default=narrow_ms)
        if narrow_ms > MAX_INVERSION * wide_ms:
            message = (
                f"the target's forward over {width} tokens took {narrow_ms:.1f} ms and one over more tokens {wide_ms:.1f} ms: the machine "
                "was probably busy, and the verdict is as uncertain; remove this stage's folder and run it again on an idle machine"
            )
            return [Finding("noisy_timing", WARNING, message)]
    return []


def _size(gib: float) -> str:
    return f"{gib:.2f} GiB" if gib >= 0.1 else f"{gib * 1024:.1f} MiB"


def _show(
    verdict: Verdict, findings: list[Finding], sizes_gib: dict[str, float], estimates: dict[str, float]
) -> None:
    console = Console(highlight=False)
    console.print(verdict_table(verdict))
    needs = Table("need", "size", title="what the run needs (estimates)")
    for name, size in sizes_gib.items():
        needs.add_row(name.replace("_", " "), _size(size))
    for name, value in estimates.items():
        needs.add_row(name, f"at most {value:.1f} min")
    console.print(needs)
    for finding in findings:
        console.print(f"[yellow]{finding.severity}[/] ({finding.code}): {finding.message}", soft_wrap=True)
