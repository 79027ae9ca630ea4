"""Whose model the target is: its Hugging Face id and licence, as far as they are known."""

import re
from dataclasses import dataclass
from pathlib import Path

from pipeline.schema import TargetConfig

EMBEDDED_ID, EMBEDDED_LICENSE = "HuggingFaceTB/SmolLM2-135M-Instruct", "apache-2.0"


@dataclass(frozen=True)
class SourceModel:
    """None where nothing says it: a guessed licence is worse than none."""

    base_model: str | None
    license: str | None


def describe_source(settings: TargetConfig, folder: Path) -> SourceModel:
    """From the settings (embedded target, Hugging Face id) and the model card in the target's folder."""
    if settings.random is not None:
        return SourceModel(None, None)
    if settings.path is None:
        return SourceModel(EMBEDDED_ID, EMBEDDED_LICENSE)
    is_id = not settings.path.startswith("~/") and not Path(settings.path).exists()
    return SourceModel(settings.path if is_id else None, _card_license(folder / "README.md"))


def _card_license(card: Path) -> str | None:
    """`license:` in the YAML front matter of a model card."""
    if not card.is_file():
        return None
    front = re.match(r"---\n(.*?)\n---", card.read_text(encoding="utf-8", errors="replace"), re.DOTALL)
    found = re.search(r"^license:\s*([\w.\-]+)\s*$", front.group(1), re.MULTILINE) if front else None
    return found.group(1) if found else None
