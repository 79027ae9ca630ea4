"""The last stage: a draft folder that engines load as it is, with everything that was measured about it.

Checks come before the first file, and again after the last one: what is written is loaded back and must give the same logits.
"""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NotRequired, TypedDict, cast

from huggingface_hub import HfApi
from transformers import PreTrainedModel

from pipeline.card import CardFacts, render_card
from pipeline.context import StageContext
from pipeline.corpus.mixture import source_name, sources_of
from pipeline.draft_folder import export_draft
from pipeline.prediction import read_prediction
from pipeline.report import (
    Report,
    best_draft_sample_method,
    best_gamma,
    describe_machine,
    distilled_speedups,
    read_acceptance,
    read_bench,
    read_result,
    stage_minutes,
)
from pipeline.serving_files import write_serving_files
from pipeline.source_model import describe_source
from pipeline.store import git_commit, installed_versions, read_record, write_json

log = logging.getLogger(__name__)

#: Where nothing was benchmarked; the fastest measured gamma takes its place.
DEFAULT_GAMMA = 4


@dataclass(frozen=True)
class ServingChoice:
    """How to serve the draft, by what was measured."""

    gamma: int
    draft_sample_method: str


class TrainFile(TypedDict):
    """`train.json` of the distill stage; further keys are allowed and copied into the provenance."""

    vocab_shortlist: NotRequired[list[int] | None]
    num_steps: NotRequired[int]
    num_supervised_tokens: NotRequired[int]
    seconds: NotRequired[float]
    best_acceptance: NotRequired[float]


def run_export(context: StageContext) -> dict[str, object]:
    """Write `draft/`, `report.json` and, beside them, what engines start from (`pipeline.serving_files`).

    Reads: distill's `draft/` and `train.json`, eval's `acceptance.json`, bench's `bench.json`, corpus's `corpus.json`.

    Raises:
        ValueError: the trained draft cannot be served with this target; each reason is named.
    """
    config, inputs = context.config, context.inputs
    acceptance, bench = read_acceptance(inputs["eval"]), read_bench(inputs["bench"])
    train = cast(TrainFile, read_result(inputs["distill"], "train.json"))
    choice = ServingChoice(
        gamma=best_gamma(bench["bench"], default=DEFAULT_GAMMA),
        draft_sample_method=best_draft_sample_method(acceptance),
    )
    draft_dir = context.work_dir / "draft"
    model, findings = export_draft(
        inputs["distill"] / "draft",
        draft_dir,
        target=context.target,
        dtype=config.export.dtype,
        gamma=choice.gamma,
        copied_layers=config.draft.path is None,
        vocab_ids=train.get("vocab_shortlist"),
    )
    for finding in findings:
        log.warning("%s", finding.message)
    report: Report = {
        "target": {"name": config.target.name, "path": context.target.path},
        "draft": describe_draft(model, name=f"{config.target.name}-draft"),
        "machine": bench.get("settings", {}).get("machine") or describe_machine(config.target.dtype),
        "corpus": {
            "num_response_tokens": read_result(inputs["corpus"], "corpus.json")["num_response_tokens"]
        },
        "minutes": stage_minutes(inputs),
        "acceptance_rate": acceptance,
        "bench": bench["bench"],
        "prediction": read_prediction(inputs, sampler=config.runtime.sampler),
    }
    _write_around(context, report, train, choice)
    figures = summary_figures(report)
    final_dir = context.work_dir.with_name(context.work_dir.name.removesuffix(".incomplete")) / "draft"
    context.tracker.log_draft(final_dir, name=report["draft"]["name"], figures=figures)
    pushed_to = push_draft(draft_dir, name=report["draft"]["name"]) if config.export.push else None
    return {
        **figures,
        "gamma": choice.gamma,
        "draft_sample_method": choice.draft_sample_method,
        "pushed_to": pushed_to,
    }


def _write_around(context: StageContext, report: Report, train: TrainFile, choice: ServingChoice) -> None:
    """Everything but the model itself."""
    config, draft_dir = context.config, context.work_dir / "draft"
    shortlist = train.get("vocab_shortlist")
    source = describe_source(config.target, Path(context.target.path))
    facts = CardFacts(
        title=report["draft"]["name"],
        base_model=source.base_model,
        license=source.license,
        gamma=choice.gamma,
        draft_sample_method=choice.draft_sample_method,
        prompt_set=_prompt_set(context),
        vocab_shortlist_size=None if shortlist is None else len(shortlist),
    )
    (draft_dir / "README.md").write_text(render_card(report, facts), encoding="utf-8")
    provenance = {
        "format_version": 1,
        "vocab_shortlist": shortlist,
        "best_gamma": choice.gamma,
        "draft_sample_method": choice.draft_sample_method,
        "target": {**report["target"], "revision": context.target.revision},
        "made_by": {
            name: record.fingerprint
            for name, folder in context.inputs.items()
            if (record := read_record(folder)) is not None
        },
        "train": {key: value for key, value in train.items() if key != "vocab_shortlist"},
        "acceptance_rate": report["acceptance_rate"],
        "versions": installed_versions(),
        "git_commit": git_commit(),
    }
    write_json(draft_dir / "draftsmith.json", provenance)
    write_serving_files(
        context.work_dir,
        target=context.target.path,
        gamma=choice.gamma,
        dtype=config.target.dtype,
        draft_sample_method=choice.draft_sample_method,
        # The embedded target's weights are not its id's, and a revision's are not those that engines would fetch.
        hub_id=source.base_model if config.target.path is not None and config.target.revision is None else None,
    )
    write_json(context.work_dir / "report.json", report)


def describe_draft(model: PreTrainedModel, *, name: str) -> dict[str, Any]:
    """The report's `draft`; `path` is relative to the report. Tied weights count once."""
    text = model.config.get_text_config()
    return {
        "name": name,
        "path": "draft",
        "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
        "num_layers": int(text.num_hidden_layers),
        "hidden_size": int(text.hidden_size),
        "vocab_size": int(text.vocab_size),
        "tied_head": model.get_output_embeddings().weight is model.get_input_embeddings().weight,
    }


def summary_figures(report: Report) -> dict[str, float]:
    """The numbers that runs are compared by. Names hold the temperature: `acceptance_rate_t0`, `walltime_speedup_t1`."""
    figures = {"num_parameters": float(report["draft"]["num_parameters"])}
    for row in report["acceptance_rate"]:
        if row["draft"] == "distilled":
            figures[f"acceptance_rate_t{row['temperature']:g}_{row['sampler']}"] = row["value"]
    for temperature in sorted({row["temperature"] for row in report["bench"]}):
        if rows := distilled_speedups(report, temperature=temperature):
            figures[f"walltime_speedup_t{temperature:g}"] = rows[0]["walltime_speedup"]
            figures[f"block_efficiency_t{temperature:g}"] = rows[0]["block_efficiency"]
    return figures


def push_draft(folder: Path, *, name: str) -> str:
    """Upload the folder to a private repository of the logged-in user; return its id."""
    api = HfApi()
    repo_id: str = api.create_repo(name, private=True, exist_ok=True).repo_id
    api.upload_folder(repo_id=repo_id, folder_path=folder)
    return repo_id


def _prompt_set(context: StageContext) -> str:
    origins = [
        "questions that the target invented"
        if source.prompts is None
        else f"prompts of {source_name(source)}"
        for source in sources_of(context.config.corpus)
    ]
    return f"held-out part of {', '.join(origins)}"
