"""The drafts of a ranking: which can be measured at all, and why not; loading those that can."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from eval.teacher_forcing import Draft
from pipeline.compat import WARNING, errors
from pipeline.models import ModelRef, load_causal_lm, obtain_model
from pipeline.pair import check_start_draft
from pipeline.report import read_result
from pipeline.schema import Config
from specdec_runtime.loading import read_vocab_shortlist

#: Words that name the two drafts of the run's own distill stage.
OWN_DRAFTS = {"undistilled": "undistilled", "distilled": "draft"}


@dataclass
class Candidate:
    """One draft of a ranking. `reasons`: why it cannot be used; `warnings`: what will need mending to serve it."""

    name: str
    path: str
    reasons: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    draft: Draft | None = None

    @property
    def compatible(self) -> bool:
        """Whether it could be checked and loaded."""
        return not self.reasons


def candidates_of(
    words: Sequence[str], config: Config, target: ModelRef, distill_folder: Path | None
) -> list[Candidate]:
    """One candidate per word, in order: `undistilled` and `distilled`, folders, or Hugging Face ids.

    Raises:
        ValueError: as `require_words`, or `distilled` without a finished distill stage.
    """
    require_words(words)
    if distill_folder is None and (own := [word for word in words if word in OWN_DRAFTS]):
        raise ValueError(
            f"{', '.join(own)}: the distill stage is not finished for this configuration; run make distill first, "
            "or leave them out"
        )
    names = short_names(words)
    return [
        _own(word, distill_folder, config) if word in OWN_DRAFTS and distill_folder else _other(name, word, config, target)
        for name, word in zip(names, words, strict=True)
    ]


def require_words(words: Sequence[str]) -> None:
    """Raise ValueError for no words, or a draft named twice: known before a target is fetched."""
    if not words:
        raise ValueError(
            "no drafts to rank: name folders or Hugging Face ids, or `undistilled` and `distilled` for this "
            'configuration\'s own, as in make rank DRAFTS="undistilled distilled path/to/draft"'
        )
    repeated = sorted({word for word in words if words.count(word) > 1})
    if repeated:
        raise ValueError(f"drafts named twice: {', '.join(repeated)}")


def short_names(paths: Sequence[str]) -> list[str]:
    """The last parts of each path, as many as tell all of them apart. `none` stands for plain decoding."""
    parts = [tuple(part for part in path.split("/") if part not in ("", ".")) or (path,) for path in paths]
    for depth in range(1, max(map(len, parts), default=1) + 1):
        names = ["/".join(part[-depth:]) for part in parts]
        if len(set(names)) == len(names) and "none" not in names:
            return names
    return list(paths)


def _own(word: str, distill_folder: Path, config: Config) -> Candidate:
    """A draft of the distill stage: made with the target's tokenizer, so there is nothing to compare."""
    folder = distill_folder / OWN_DRAFTS[word]
    ids = read_result(distill_folder, "train.json")["vocab_shortlist"]
    model = load_causal_lm(str(folder), config.target.dtype, config.target.trust_remote_code, field="draft")
    vocab_ids = None if ids is None else torch.tensor(ids, dtype=torch.long)
    return Candidate(word, str(folder), draft=Draft(model, vocab_ids))


def _other(name: str, word: str, config: Config, target: ModelRef) -> Candidate:
    """A draft from elsewhere, checked against the target; whatever is wrong with it becomes its reason."""
    candidate = Candidate(name, word)
    trust = config.target.trust_remote_code
    try:
        folder = obtain_model(word, field="draft")
        findings = check_start_draft(target.path, folder, trust_remote_code=trust)
        candidate.reasons = [finding.message for finding in errors(findings)]
        candidate.warnings = [finding.message for finding in findings if finding.severity == WARNING]
        if candidate.compatible:
            model = load_causal_lm(str(folder), config.target.dtype, trust, field="draft")
            candidate.draft = Draft(model, read_vocab_shortlist(folder))
    except ValueError as error:
        candidate.reasons = [str(error)]
    return candidate
