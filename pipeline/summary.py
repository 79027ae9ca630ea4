"""What a whole run comes to, under names that stay the same: the columns of MLflow's list of runs and of `make compare`."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

from distill.config import AUTO
from pipeline.drafts import MEDUSA
from pipeline.report import AcceptanceRow, BenchRow, Report, distilled_speedups, read_result, stage_minutes
from pipeline.schema import Config
from pipeline.tracker import Tracker
from specdec_runtime.medusa_heads import CONFIG_FILE as HEADS_CONFIG_FILE


def record_summary(tracker: Tracker, config: Config, folders: Mapping[str, Path]) -> None:
    """Put the figures of the used stages, finished now or earlier, on the run of the invocation itself."""
    tracker.log_metrics(summary_metrics(folders))
    tracker.log_tags(summary_tags(config, folders))


def summary_metrics(folders: Mapping[str, Path]) -> dict[str, float]:
    """Figures of the stages in `folders`, by name.

    `acceptance_rate_t0`, `_t1`: of the distilled draft with the first of `eval.samplers`; other samplers' have their name
    behind. `walltime_speedup_t0`, `block_efficiency_t0`, `best_gamma_t0`: of its best gamma, or of Medusa heads' best
    chain. `num_corpus_tokens`, `minutes` of all these stages, `train_minutes`.
    """
    corpus, train, acceptance, bench = (
        _result(folders.get(stage), name)
        for stage, name in (
            ("corpus", "corpus.json"),
            ("distill", "train.json"),
            ("eval", "acceptance.json"),
            ("bench", "bench.json"),
        )
    )
    metrics = {"minutes": sum(stage_minutes(folders).values())}
    if corpus:
        metrics["num_corpus_tokens"] = float(corpus["num_response_tokens"])
    if train:
        metrics["train_minutes"] = train["seconds"] / 60
    return metrics | _acceptance(acceptance.get("acceptance_rate", [])) | _speed(bench.get("bench", []))


def _result(folder: Path | None, name: str) -> dict[str, Any]:
    """A stage's figures; nothing where the stage is not among the used ones, or wrote none."""
    return read_result(folder, name) if folder is not None and (folder / name).is_file() else {}


def _acceptance(rows: Iterable[AcceptanceRow]) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for row in rows:
        name = f"acceptance_rate_t{row['temperature']:g}"
        if row["draft"] == "distilled":
            metrics[name if name not in metrics else f"{name}_{row['sampler']}"] = row["value"]
    return metrics


def _speed(rows: list[BenchRow]) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for temperature in sorted({row["temperature"] for row in rows}):
        report = cast(Report, {"bench": rows})
        best = distilled_speedups(report, temperature=temperature) or distilled_speedups(
            report, temperature=temperature, draft=MEDUSA
        )
        if best:
            metrics[f"walltime_speedup_t{temperature:g}"] = best[0]["walltime_speedup"]
            metrics[f"block_efficiency_t{temperature:g}"] = best[0]["block_efficiency"]
            metrics[f"best_gamma_t{temperature:g}"] = float(best[0]["gamma"])
    return metrics


def summary_tags(config: Config, folders: Mapping[str, Path]) -> dict[str, str]:
    """`draft`, as in "2 layers x 576, 8192 ids" or "3 Medusa heads, 8192 ids", and `loss`, as in "forward_kl, cached"."""
    tags = {"loss": f"{_weighted(config.loss.weights)}, {config.loss.teacher}"}
    if "distill" in folders and (what := _trained(config, folders["distill"])):
        tags["draft"] = what
    return tags


def _trained(config: Config, distill_folder: Path) -> str | None:
    """What the distill stage made, in a few words; None where it is not there."""
    draft, heads = (distill_folder / "draft" / name for name in ("config.json", HEADS_CONFIG_FILE))
    if heads.is_file():
        shape = json.loads(heads.read_text(encoding="utf-8"))
        ids = None if shape["num_ids"] == shape["vocab_size"] else shape["num_ids"]
        body = f"{shape['num_heads']} Medusa heads"
    elif draft.is_file():
        shape = json.loads(draft.read_text(encoding="utf-8"))
        shape = shape.get("text_config", shape)
        ids = _shortlist_size(config, distill_folder)
        body = f"{shape.get('num_hidden_layers', '?')} layers x {shape.get('hidden_size', '?')}"
    else:
        return None
    return f"{body}, {'whole vocabulary' if ids is None else f'{ids} ids'}"


def _shortlist_size(config: Config, distill_folder: Path) -> int | None:
    """The number of ids that is set, or that the distill stage chose."""
    if config.draft.vocab_shortlist != AUTO:
        return config.draft.shortlist_size
    ids = read_result(distill_folder, "train.json")["vocab_shortlist"]
    return None if ids is None else len(ids)


def _weighted(weights: Mapping[str, float]) -> str:
    used = {name: weight for name, weight in weights.items() if weight > 0}
    return next(iter(used)) if len(used) == 1 else " + ".join(f"{weight:g} {name}" for name, weight in used.items())
