"""Tables of the pages that commands write."""

from collections.abc import Iterable, Sequence


def table_lines(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table."""
    return [_line(heading), "|---" * len(heading) + "|", *map(_line, rows)]


def _line(words: Sequence[str]) -> str:
    return f"| {' | '.join(words)} |"
