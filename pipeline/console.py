"""Where results are printed."""

from rich.console import Console

#: Columns of the widest table, for a file or a pipe, which have no width of their own.
FILE_WIDTH = 150


def result_console() -> Console:
    """As wide as the terminal, or wide enough for every table where there is none; texts are coloured by markup alone."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=max(console.width, FILE_WIDTH))
