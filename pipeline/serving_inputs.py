"""What the serving measurements start from: the exported draft, its target, and prompts that it was not trained on."""

import argparse
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipeline.corpus import read_corpus, split_corpus
from pipeline.models import DTYPES


@dataclass(frozen=True)
class ServedPair:
    """A target and its exported draft with the settings of `speculative_config.json`, all paths absolute or ids.

    `dtype`: the number format to serve them in. `report`: what `report.json` says about them.
    """

    target: str
    draft: Path
    num_speculative_tokens: int
    sampler: str
    dtype: str
    report: dict[str, Any]

    def speculative_config(self) -> dict[str, Any]:
        """For vLLM, from any working directory."""
        return {
            "method": "draft_model",
            "model": str(self.draft),
            "num_speculative_tokens": self.num_speculative_tokens,
            "draft_sample_method": self.sampler,
        }

    def with_settings(
        self, *, gamma: int | None = None, sampler: str | None = None, dtype: str | None = None
    ) -> "ServedPair":
        """Another proposal length, sampler or number format, where one is given."""
        gamma = self.num_speculative_tokens if gamma is None else gamma
        return replace(
            self, num_speculative_tokens=gamma, sampler=sampler or self.sampler, dtype=dtype or self.dtype
        )


def add_pair_arguments(parser: argparse.ArgumentParser) -> None:
    """Which pair is measured, and with which settings instead of the exported ones."""
    parser.add_argument("--artifacts", type=Path, default=Path("artifacts"), help="folder of a finished run")
    parser.add_argument("--target", help="folder or id, instead of the one that the report names")
    parser.add_argument(
        "--gamma", type=int, help="proposed tokens per round, instead of the exported setting"
    )
    parser.add_argument(
        "--sampler", choices=["probabilistic", "greedy"], help="instead of the exported setting"
    )
    parser.add_argument(
        "--dtype",
        choices=sorted(DTYPES),
        help="of both models, instead of the one that the report was measured in",
    )


def read_pair(artifacts: Path, *, target: str | None = None) -> ServedPair:
    """The pair that lies in `artifacts/latest/export`.

    Args:
        target: a folder or id instead of the one that the report names.

    Raises:
        ValueError: there is no export, or its target is not where the report says.
    """
    folder = artifacts / "latest" / "export"
    if not (folder / "report.json").is_file():
        raise ValueError(
            f"--artifacts={str(artifacts)!r}: holds no exported draft (latest/export/report.json); make one with `make distill`"
        )
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    config = json.loads((folder / "speculative_config.json").read_text(encoding="utf-8"))
    return ServedPair(
        target=_find_target(target or report["target"]["path"], artifacts),
        draft=(folder / config["model"]).resolve(),
        num_speculative_tokens=config["num_speculative_tokens"],
        sampler=config["draft_sample_method"],
        dtype=str(report["machine"]["dtype"]),
        report=report,
    )


def _find_target(path: str, artifacts: Path) -> str:
    """Local paths in the report are relative to where the run started, mostly the parent of the artifacts folder."""
    for candidate in (Path(path), artifacts.resolve().parent / path):
        if candidate.is_dir():
            return str(candidate.resolve())
    if path.count("/") <= 1 and not path.startswith((".", "/", "~")):
        return path
    raise ValueError(f"the target {path!r} is not a folder here; name it with --target")


def held_out_rows(artifacts: Path) -> list[dict[str, Any]]:
    """Held-out corpus rows, those that the reported figures come from first, then those that chose the checkpoint.

    Raises:
        ValueError: there is no corpus in `artifacts/latest/corpus`.
    """
    stage = artifacts / "latest" / "distill" / "stage.json"
    corpus = artifacts / "latest" / "corpus"
    if not stage.is_file():
        raise ValueError(
            f"--artifacts={str(artifacts)!r}: holds no distill stage; make one with `make distill`"
        )
    fraction = json.loads(stage.read_text(encoding="utf-8"))["config"]["corpus.held_out_fraction"]
    _, held_out = split_corpus(read_corpus(corpus), fraction)
    validation, test = split_corpus(held_out, 0.5, salt="test")
    return [dict(row) for part in (test, validation) for row in part]


def held_out_prompts(artifacts: Path, num_prompts: int, *, max_tokens: int) -> list[list[int]]:
    """Token ids of the first distinct held-out prompts of at most `max_tokens`.

    Raises:
        ValueError: none fits, or there is no corpus.
    """
    prompts: dict[str, list[int]] = {}
    for row in held_out_rows(artifacts):
        if len(row["prompt_token_ids"]) <= max_tokens and len(prompts) < num_prompts:
            prompts.setdefault(row["prompt_id"], list(row["prompt_token_ids"]))
    if not prompts:
        raise ValueError(
            f"no held-out prompt of the corpus has at most {max_tokens} tokens; raise --max-length"
        )
    return list(prompts.values())
