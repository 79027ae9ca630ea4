"""Which draft? `python -m pipeline.rank DRAFT ... [setting=value ...]` sets candidates side by side.

Each word without `=` is a draft: a folder, a Hugging Face id, or `undistilled` and `distilled` for those of the
configuration's own distill stage. The other words are settings, as for `python -m pipeline`. Exit codes: 0 the table
has measured drafts; 2 none could be used, each with its reason, or the command was used wrongly.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from eval.plots import speedup_figure
from eval.teacher_forcing import Draft
from pipeline.commands import compose_config, run_command
from pipeline.console import result_console
from pipeline.context import StageContext
from pipeline.estimates import kv_bytes_per_token, num_parameters, weight_bytes
from pipeline.eval_rows import EvalRows, answered_rows, eval_rows, fitting
from pipeline.finished import finished_context, finished_folders
from pipeline.models import ModelRef, load_causal_lm, load_tokenizer, resolve_target
from pipeline.rank_candidates import Candidate, candidates_of, require_words
from pipeline.rank_measure import Outlook, Row, measurable, measure_speedups, outlooks
from pipeline.rank_table import rank_row, rank_table, sort_rows
from pipeline.report import describe_machine
from pipeline.schema import Config
from pipeline.store import fingerprint_of, write_json
from pipeline.tracker import Tracker
from pipeline.tracking import open_tracker
from pipeline.viewer import VIEWER_FILE, viewer_page

NAME = "rank"
MIB = 2**20
_SETTING = re.compile(r"[+~]{0,2}[\w./@]+=|~")


def main(words: Sequence[str]) -> None:
    """Rank the drafts among the words under the settings among them.

    Raises:
        ValueError: no drafts, none that can be used, or nothing to measure acceptance on.
    """
    settings = [word for word in words if _SETTING.match(word) or word.startswith("-")]
    drafts = [word for word in words if word not in settings]
    require_words(drafts)
    rank(compose_config(settings), drafts)


def rank(config: Config, drafts: Sequence[str]) -> Path:
    """Measure, print the table and write `artifacts/rank/<fingerprint>/rank.json` with the token viewer beside it.

    Raises:
        ValueError: as `main`. Where no draft can be used, the table with the reasons is printed and written first.
    """
    target = resolve_target(config)
    distill = finished_folders(config, target, ["distill"]).get("distill")
    candidates = candidates_of(drafts, config, target, distill)
    fingerprint = fingerprint_of({"drafts": list(drafts), "target": target.revision, "config": asdict(config)})
    folder = Path(config.artifacts_dir) / NAME / fingerprint[:12]
    folder.mkdir(parents=True, exist_ok=True)
    with open_tracker(config) as tracker, tracker.stage(NAME, fingerprint):
        result = _measured(config, target, candidates, folder, tracker)
        write_json(folder / "rank.json", result)
        tracker.log_metrics(_figures(result["drafts"]))
        tracker.log_reference(NAME, folder)
    console = result_console()
    console.print(rank_table(result["drafts"]))
    for row in result["drafts"]:
        for reason in row["reasons"]:
            console.print(f"[red]{row['draft']}[/]: {reason}", soft_wrap=True)
        for warning in row["warnings"]:
            console.print(f"[yellow]{row['draft']}[/]: {warning}", soft_wrap=True)
    console.print(f"ranking: {folder / 'rank.json'}", soft_wrap=True)
    if not any(row["compatible"] for row in result["drafts"]):
        raise ValueError(f"none of the drafts {list(drafts)} can be used with {target.name}: the reasons are above")
    return folder


def _measured(
    config: Config, reference: ModelRef, candidates: Sequence[Candidate], folder: Path, tracker: Tracker
) -> dict[str, Any]:
    """Everything that is written; with no usable draft, no model but the drafts' own is loaded."""
    drafts = {c.name: c.draft for c in candidates if c.draft is not None and c.compatible}
    found: dict[str, Outlook] = {}
    bench: list[Row] = []
    settings: dict[str, Any] = {"target": reference.name, "drafts": [c.path for c in candidates]}
    if drafts:
        target = load_causal_lm(reference.path, config.target.dtype, config.target.trust_remote_code)
        measured = rows_to_measure(config, reference, target, folder, tracker)
        drafts = measurable(config, target, candidates, measured)
    if drafts:
        num_ids = num_ids_of(reference, target, drafts)
        found = outlooks(config, target, drafts, measured, num_token_ids=num_ids)
        verdicts = {name: outlook.verdict for name, outlook in found.items()}
        models = [target, *(draft.model for draft in drafts.values())]
        prompts = fitting(
            measured.prompts.values(), models, num_new_tokens=config.bench.max_new_tokens, field="bench.max_new_tokens"
        )
        bench = measure_speedups(config, target, drafts, verdicts, prompts)
        if config.eval.num_viewer_prompts:
            page = viewer_page(config, reference, target, drafts, measured.prompts.values(), num_token_ids=num_ids)
            (folder / VIEWER_FILE).write_text(page, encoding="utf-8")
            tracker.log_text(page, VIEWER_FILE)
        figure = speedup_figure(bench, temperature=min(config.bench.temperatures))
        tracker.log_figure(figure, "rank_speedup.png")
        settings |= {"measured_on": measured.name, "sampler": config.runtime.sampler,
                     "temperature": min(config.bench.temperatures),
                     "machine": describe_machine(config.target.dtype)}  # fmt: skip
    rows = [rank_row(c, found.get(c.name), bench, _size(c.draft)) for c in candidates]
    return {"drafts": sort_rows(rows), "bench": bench, "settings": settings}


def rows_to_measure(
    config: Config, reference: ModelRef, target: PreTrainedModel, folder: Path, tracker: Tracker
) -> EvalRows:
    """Answers to `eval.prompts`, or the held-out ones of the finished corpus.

    Raises:
        ValueError: neither is there.
    """
    if config.eval.prompts is not None:
        return answered_rows(config, reference, target)
    context: StageContext = finished_context(
        config, reference, ["corpus"], work_dir=folder, tracker=tracker, way_out="or give prompts: eval.prompts=FILE"
    )
    return eval_rows(context, target)


def num_ids_of(reference: ModelRef, target: PreTrainedModel, drafts: Mapping[str, Draft]) -> int | None:
    """The tokenizer's number of ids where heads are padded to different widths, else None."""
    widths = {int(model.config.get_text_config().vocab_size) for model in (target, *(d.model for d in drafts.values()))}
    if len(widths) == 1:
        return None
    tokenizer = load_tokenizer(reference.path, reference.trust_remote_code)
    num_ids: int = max(tokenizer.get_vocab().values()) + 1
    return min(num_ids, *widths)


def _size(draft: Draft | None) -> dict[str, float]:
    """Parameters, and MiB of the weights and of 1000 tokens in the KV cache."""
    if draft is None:
        return {}
    model = draft.model
    return {
        "num_parameters": num_parameters(model),
        "weights_mib": weight_bytes(model) / MIB,
        "kv_mib_per_1000_tokens": 1000 * kv_bytes_per_token(model.config, model.dtype.itemsize) / MIB,
    }


def _figures(rows: Sequence[Row]) -> dict[str, float]:
    names = ("measured_speedup", "predicted_speedup", "cost_ratio")
    return {
        f"{name}_{re.sub(r'[^0-9A-Za-z_./ -]', '_', row['draft'])}": float(row[name])
        for row in rows
        for name in names
        if row.get(name) is not None
    }


if __name__ == "__main__":
    run_command(main)
