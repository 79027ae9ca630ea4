"""The distill and eval stages for Medusa heads, which are no model of their own and have no undistilled counterpart."""

import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from distill.medusa import train_medusa
from eval.acceptance_summary import Resampling
from eval.head_acceptance import HeadAcceptance
from pipeline.context import StageContext, load_target
from pipeline.corpus.policy import share_temperatures
from pipeline.eval_rows import eval_rows
from pipeline.held_out import corpus_parts
from pipeline.shortlist import shortlist
from pipeline.source_model import describe_source
from pipeline.store import write_json
from pipeline.training_figures import log_training_curve
from specdec_runtime.loading import PROVENANCE_FILE
from specdec_runtime.medusa_heads import MedusaHeads, heads_of_target, load_medusa_heads

#: Held-out tokens by which the best checkpoint is chosen.
NUM_VALIDATION_TOKENS = 5000
Row = Mapping[str, Any]


def distill_heads(context: StageContext) -> dict[str, Any]:
    """Train the heads that `draft` describes; write `draft/` (weights, config, card, provenance) and `train.json`, which is returned."""
    config, parts = context.config, corpus_parts(context)
    assert config.draft.num_heads is not None
    target = load_target(context)
    acceptance_of = HeadAcceptance(
        target, parts.validation, temperatures=share_temperatures(config.corpus), max_tokens=NUM_VALIDATION_TOKENS
    )
    vocab_ids = shortlist(context, parts.train)
    heads = heads_of_target(
        target, num_heads=config.draft.num_heads, num_layers=config.draft.num_layers, vocab_ids=vocab_ids
    )
    trained = train_medusa(
        heads, target, parts.train, loss=config.loss, train=config.train, output_dir=context.work_dir,
        acceptance_of=acceptance_of, on_metrics=context.tracker.log_metrics,
    )  # fmt: skip
    best = load_medusa_heads(trained.best_dir, "float32")
    rows = [table.row(Resampling()) for table in acceptance_of.tables(best)]
    folder = context.work_dir / "draft"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(trained.best_dir, folder)
    (folder / "README.md").write_text(heads_card(context, best, rows), encoding="utf-8")
    log_training_curve(context.tracker, trained.curve)
    record = {
        **asdict(trained),
        "best_dir": "draft",
        "tokens_per_second": trained.num_supervised_tokens / max(trained.seconds, 1e-9),
        "num_train_rows": len(parts.train),
        "num_validation_rows": len(parts.validation),
        "vocab_shortlist": vocab_ids,
        "initial_draft": {"init": "medusa"},
        "validation": rows,
    }
    target_is = {"name": context.target.name, "revision": context.target.revision}
    train = {key: value for key, value in record.items() if key != "vocab_shortlist"}
    write_json(folder / PROVENANCE_FILE, {"format_version": 1, "target": target_is, "train": train})
    write_json(context.work_dir / "train.json", record)
    for leftover in context.work_dir.glob("best-*"):
        shutil.rmtree(leftover)
    return record


def run_heads_eval(context: StageContext) -> dict[str, object]:
    """Write `acceptance.json`: per head and temperature, with intervals over prompts; no `acceptance_rate` of a draft model."""
    settings = context.config.eval
    target = load_target(context)
    measured = eval_rows(context, target)
    heads = load_heads(context)
    acceptance = HeadAcceptance(
        target, measured.rows, temperatures=settings.temperatures, batch_tokens=settings.batch_tokens
    )
    resampling = Resampling(settings.num_bootstrap, settings.seed)
    rows = [table.row(resampling) for table in acceptance.tables(heads)]
    result: dict[str, Any] = {"acceptance_rate": [], "heads": rows, "measured_on": measured.name}
    write_json(context.work_dir / "acceptance.json", result)
    Console(highlight=False, width=100).print(heads_table(rows))
    return {
        f"head{row['head']}_{name}_t{row['temperature']:g}": row[name]["value"]
        for row in rows
        for name in ("top1", "top5", "acceptance_rate")
    }


def load_heads(context: StageContext, *, dtype: str | None = None) -> MedusaHeads:
    """The heads that the distill stage left, in `dtype` (default: the target's)."""
    return load_medusa_heads(context.inputs["distill"] / "draft", dtype or context.config.target.dtype)


def heads_table(rows: Iterable[Row]) -> Table:
    """Acceptance of each head."""
    table = Table(title="Medusa heads: what the target says k tokens after the next one")
    for column in ("head", "temperature", "top-1", "top-5", "acceptance rate", "95% interval"):
        table.add_column(column, justify="right")
    for row in rows:
        rate = row["acceptance_rate"]
        table.add_row(
            str(row["head"]), f"{row['temperature']:g}", f"{row['top1']['value']:.3f}", f"{row['top5']['value']:.3f}",
            f"{rate['value']:.3f}", f"{rate['low']:.3f} to {rate['high']:.3f}",
        )  # fmt: skip
    return table


def heads_card(context: StageContext, heads: MedusaHeads, rows: Iterable[Row]) -> str:
    """The model card: what the heads are, how they are loaded, and what was measured on held-out answers."""
    source = describe_source(context.config.target, Path(context.target.path))
    front = {"base_model": source.base_model, "license": source.license, "library_name": "draftsmith"}
    lines = ["---", *(f"{key}: {value}" for key, value in front.items() if value), "tags: [medusa, speculative-decoding]", "---"]
    shape, name = heads.shape, context.config.target.name
    ids = "the whole vocabulary" if shape.num_ids == shape.vocab_size else f"{shape.num_ids} frequent tokens"
    lines += [
        f"# {name}: {shape.num_heads} Medusa heads",
        "",
        f"Each head has {shape.num_layers} residual block(s) and an output layer over {ids}. They read the last hidden state of "
        f"{name}, which they do not change, and serve for speculative decoding with it and with no other model.",
        "",
        "```python",
        "from specdec_runtime import DecoderConfig, SpeculativeDecoder, load_medusa_heads",
        f'config = DecoderConfig(drafter="medusa", num_speculative_tokens={shape.num_heads})',
        'decoder = SpeculativeDecoder(target, load_medusa_heads("<this folder>"), config)',
        "```",
        "",
        "Held-out answers by which the checkpoint was chosen. top-1 and top-5: the target's most likely token is the head's, or one "
        "of its five most likely. acceptance rate: the mass that speculative sampling accepts.",
        "",
        "| head | temperature | top-1 | top-5 | acceptance rate |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['head']} | {row['temperature']:g} | {row['top1']['value']:.3f} | {row['top5']['value']:.3f} | "
        f"{row['acceptance_rate']['value']:.3f} |"
        for row in rows
    ]
    return "\n".join(lines) + "\n"
