"""What the commands beside `python -m pipeline` share: their words, composed configurations, and exit codes."""

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar, cast

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pipeline.config import conf_dir, register_schema, to_config
from pipeline.errors import (
    EXIT_CRASH,
    EXIT_INTERRUPTED,
    EXIT_USER_MISTAKE,
    describe,
    message_of,
    print_anything,
)
from pipeline.schema import Config

Plan = TypeVar("Plan")


def run_command(command: Callable[[list[str]], None]) -> None:
    """Call `command` with the words of the command line, and end the process with an exit code of `pipeline/errors.py`."""
    print_anything()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        command(sys.argv[1:])
    except KeyboardInterrupt:
        print("\ninterrupted: the same command goes on from here", file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)
    except Exception as error:
        if (message := message_of(error)) is not None:
            print(f"error: {message}", file=sys.stderr)
            sys.exit(EXIT_USER_MISTAKE)
        traceback.print_exc()
        sys.exit(EXIT_CRASH)


def compose_config(overrides: Sequence[str]) -> Config:
    """The checked configuration of `python -m pipeline <overrides>`.

    Raises:
        ValueError: what Hydra refuses, or values that cannot work, named with their field.
    """
    options = [word for word in overrides if word.startswith("-")]
    if options:
        raise ValueError(f"{options}: only settings, as in train.max_minutes=3, can be given here")
    register_schema()
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(conf_dir()), version_base="1.3"):
            return to_config(compose("config", overrides=list(overrides)))
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(describe(error)) from error


def read_plan(schema: type[Plan], group: str, words: Sequence[str]) -> tuple[str, Plan, list[str]]:
    """The plan that the first word names, its own settings changed by words such as `<group>.field=value`.

    Args:
        schema: dataclass of the plan. group: folder of `conf/` where plans lie; the word may also be a YAML file.

    Returns:
        The plan's name, the plan, and the words that are settings of the runs.

    Raises:
        ValueError: no such plan, or a field that the dataclass does not have.
    """
    folder = conf_dir() / group
    known = sorted(file.stem for file in folder.glob("*.yaml"))
    if not words or "=" in words[0]:
        raise ValueError(f"name a plan first: {', '.join(known)}, or a YAML file like those in {folder}")
    file = Path(words[0]) if words[0].endswith(".yaml") else folder / f"{words[0]}.yaml"
    if not file.is_file():
        raise ValueError(f"{words[0]}: no such plan; choose from {', '.join(known)}, or give a YAML file")
    plan, others = read_own_settings(schema, group, words[1:], file=file)
    return file.stem, plan, others


def read_own_settings(
    schema: type[Plan], group: str, words: Sequence[str], *, file: Path | None = None
) -> tuple[Plan, list[str]]:
    """`schema` with what a YAML `file` sets, changed by the words `<group>.field=value`; and the other words.

    Raises:
        ValueError: a field that the dataclass does not have, or a value that it refuses.
    """
    own = [word.removeprefix(f"{group}.") for word in words if word.startswith(f"{group}.")]
    layers = [] if file is None else [OmegaConf.load(file)]
    try:
        merged = OmegaConf.merge(OmegaConf.structured(schema), *layers, OmegaConf.from_dotlist(own))
        plan = cast(Plan, OmegaConf.to_object(merged))
    except OmegaConfBaseException as error:
        raise ValueError(f"{group if file is None else f'{group} {file.stem}'}: {describe(error)}") from error
    return plan, [word for word in words if not word.startswith(f"{group}.")]
