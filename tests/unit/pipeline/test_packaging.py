"""What an installed copy holds."""

import tomllib

from tests.conftest import ROOT


def test_every_package_is_listed() -> None:
    """An editable install finds a folder that `pyproject.toml` forgot; a wheel does not have it."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    tops = ("distill", "eval", "pipeline", "specdec_runtime")
    folders = [file.parent for top in tops for file in (ROOT / top).rglob("__init__.py")]
    assert {str(folder.relative_to(ROOT)).replace("/", ".") for folder in folders} == set(listed) - {"pipeline.conf"}
