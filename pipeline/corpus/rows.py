"""What passes from the sources to the generator: a prompt, and a row, which is one answer to be had for it."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Prompt:
    """What the target is asked. `prompt_id` is a hash of the ids: the same on every run and machine.

    `row` names the place that it came from, as in `file.jsonl:17`; `domain` is "" where none was given.
    """

    prompt_id: str
    source: str
    token_ids: tuple[int, ...]
    row: str
    domain: str = ""


@dataclass(frozen=True)
class Row:
    """One answer to be generated. `(prompt_id, sample_index)` tells the rows of a corpus apart; `row` is its `Prompt.row`."""

    prompt_id: str
    source: str
    domain: str
    prompt_token_ids: tuple[int, ...]
    temperature: float
    top_p: float
    seed: int
    sample_index: int
    max_new_tokens: int
    row: str

    @property
    def row_id(self) -> str:
        """Unique in a corpus, and the same on every run."""
        return f"{self.prompt_id}-{self.sample_index}"


def make_prompt(token_ids: Sequence[int], *, source: str, row: str, domain: str = "") -> Prompt:
    """A prompt with its content id."""
    text = ",".join(str(token_id) for token_id in token_ids)
    prompt_id = hashlib.sha256(text.encode()).hexdigest()[:32]
    return Prompt(prompt_id, source, tuple(token_ids), row, domain)
