"""What stages may record of themselves, whatever records it. This one records nothing; `pipeline/tracking.py` has MLflow's."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_PARAM_CHARS = 500  # of the oldest servers still in use; newer ones take 6000


class Tracker:
    """Records nothing: what is used when tracking is off. Its methods are all that stages may call."""

    @contextmanager
    def stage(self, name: str, fingerprint: str) -> Iterator[None]:
        """Everything logged inside belongs to this stage's own run, which ends as finished, failed or killed."""
        yield

    def log_metrics(self, metrics: Mapping[str, float], step: int = 0) -> None:
        """Numbers at a step of the stage; `nan` and `inf` are kept as they are."""

    def log_tags(self, tags: Mapping[str, str]) -> None:
        """Short texts that describe the run; a tag that is there is overwritten."""

    def log_figure(self, figure: "Figure", name: str) -> None:
        """A matplotlib figure, under a file name such as `acceptance.png`."""

    def log_text(self, text: str, name: str) -> None:
        """A text file, under a name whose ending says what it is, such as `viewer.html`."""

    def log_reference(self, name: str, path: Path) -> None:
        """Where an artifact lies; nothing is copied."""

    def log_corpus(self, folder: Path, *, digest: str, num_rows: int) -> None:
        """The corpus as a dataset that this run made, by reference. `digest` identifies its content."""

    def log_draft(self, folder: Path, *, name: str, figures: Mapping[str, float]) -> None:
        """The draft as a logged and registered model whose weights stay in `folder`."""


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested settings as `group.field` -> text, cut to what every server accepts."""
    flat: dict[str, str] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{name}.")
        else:
            text = value if isinstance(value, str) else json.dumps(value)
            flat[name] = text if len(text) <= MAX_PARAM_CHARS else text[: MAX_PARAM_CHARS - 3] + "..."
    return flat
