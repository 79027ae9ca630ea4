"""The GPU check on a machine without a GPU: its own logic, on tiny shapes."""

import importlib.util
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.conftest import ROOT


@pytest.fixture(scope="module")
def check() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_check", ROOT / "scripts" / "gpu_check.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_check"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_without_a_cuda_device_it_says_so(tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash", str(ROOT / "scripts" / "gpu_check.sh"), "--output", str(tmp_path / "out")],
        env={"PATH": "/usr/bin:/bin", "PYTHON": sys.executable},
        text=True, capture_output=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "no CUDA device" in done.stderr
    assert not (tmp_path / "out").exists()


def test_figures_of_both_parts_on_tiny_shapes(check: ModuleType, tmp_path: Path) -> None:
    for part in ("graphs", "shapes"):
        assert check.main(["--device", "cpu", "--output", str(tmp_path), "--part", part]) == 0
    rows = {part: json.loads((tmp_path / f"{part}.json").read_text()) for part in ("graphs", "shapes")}
    assert [row["is_same"] for row in rows["graphs"]] == [True, True]
    assert {row["what"] for row in rows["shapes"]} == {"tiny"}
    results = {name: {"status": "passed", "reason": "", "rows": found} for name, found in rows.items()}
    table = check.table_of(results)
    assert table.count("same tokens in fp32") == 2
    assert table.count("synthetic acceptance 0.7") == 3
    assert "gamma auto" in table


def test_a_part_is_passed_failed_late_or_skipped(check: ModuleType, tmp_path: Path) -> None:
    part = check.Part("it", [sys.executable, "-c", "open('it.json', 'w').write('[1]')"], 60)
    passed = check.run_part(part, "cpu", tmp_path)
    assert (passed["status"], passed["rows"]) == ("passed", [1])
    failed = check.run_part(
        replace(part, command=[sys.executable, "-c", "raise SystemExit(3)"]), "cpu", tmp_path
    )
    assert failed["status"] == "failed"
    assert "exit code 3" in failed["reason"]
    late = check.run_part(replace(part, command=["sleep", "30"], limit_s=1), "cpu", tmp_path)
    assert "not done after 1 s" in late["reason"]
    missing = check.run_part(replace(part, needs=("torch", "no_such_package")), "cpu", tmp_path)
    assert (missing["status"], missing["reason"]) == ("skipped", "not installed: no_such_package")
    assert check.run_part(replace(part, is_for_cuda=True), "cpu", tmp_path)["status"] == "skipped"


def test_all_limits_together_stay_under_eight_minutes(check: ModuleType, tmp_path: Path) -> None:
    assert sum(part.limit_s for part in check.parts_of("cuda", tmp_path)) < 8 * 60


def test_a_failed_part_is_the_exit_code(
    check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = [check.Part(name, ["sh", "-c", f"exit {code}"], 60) for name, code in (("good", 0), ("bad", 1))]
    monkeypatch.setattr(check, "parts_of", lambda device, output: parts)
    assert check.main(["--device", "cpu", "--output", str(tmp_path)]) == 1
    found = json.loads((tmp_path / "gpu_check.json").read_text())
    assert {name: part["status"] for name, part in found["parts"].items()} == {
        "good": "passed",
        "bad": "failed",
    }
    assert "bad       failed" in capsys.readouterr().out
