"""The runs of an MLflow experiment side by side: `python -m pipeline.compare [compare.last=20] [tracking.uri=...]`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Optional, cast

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console

from pipeline.commands import compose_config, run_command
from pipeline.compare_page import compare_page
from pipeline.compare_table import compare_table, lines_of
from pipeline.errors import describe
from pipeline.tracking_read import read_runs


@dataclass
class CompareOptions:
    """`name`: only runs that have this in their name or in that of the run above them. `page`: null is in artifacts_dir."""

    last: int = 50
    name: str = ""
    page: Optional[str] = None


def main(words: list[str]) -> None:
    """Print the table and write the page.

    Raises:
        ValueError: unknown options, an unreadable store, or no run to show.
    """
    own = [word.removeprefix("compare.") for word in words if word.startswith("compare.")]
    config = compose_config([word for word in words if not word.startswith("compare.")])
    try:
        merged = OmegaConf.merge(OmegaConf.structured(CompareOptions), OmegaConf.from_dotlist(own))
        options = cast(CompareOptions, OmegaConf.to_object(merged))
    except OmegaConfBaseException as error:
        raise ValueError(f"compare: {describe(error)}") from error
    runs = [run for run in read_runs(config.tracking) if options.name in f"{run.group} / {run.name}"][: options.last]
    if not runs:
        raise ValueError(
            f"{config.tracking.uri}, experiment {config.tracking.experiment}: no run "
            + (f"with compare.name={options.name} in its name" if options.name else "yet; `make distill` makes one")
        )
    lines = lines_of(runs)
    title = f"{config.tracking.experiment}: {len(runs)} runs"
    table, console = compare_table(lines, title=title), Console(highlight=False)
    if not console.is_terminal:  # a file is as wide as the table: no name is folded
        console = Console(highlight=False, width=Console(width=10_000).measure(table).maximum)
    console.print(table)
    page = Path(options.page) if options.page else Path(config.artifacts_dir) / "compare.html"
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(compare_page(lines, title=title), encoding="utf-8")
    console.print(f"page: {page}", soft_wrap=True)


if __name__ == "__main__":
    run_command(main)
