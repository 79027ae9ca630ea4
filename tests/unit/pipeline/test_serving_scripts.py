"""`serve.sh` and its sisters as they stand: where they find target and vLLM, and what they set for a CPU build."""

import os
import shlex
import subprocess
import venv
from pathlib import Path

import pytest

from pipeline.serving_files import write_serving_files
from specdec_runtime.backends.vllm_cpu import cpu_settings

SHOWN = ("VLLM_CPU_KVCACHE_SPACE", "VLLM_CPU_OMP_THREADS_BIND", "LD_PRELOAD")


@pytest.fixture
def export(tmp_path: Path) -> Path:
    """An export in a run's folder, with its target where such a run has it."""
    folder = tmp_path / "run" / "artifacts" / "export" / "abc"
    (folder / "draft").mkdir(parents=True)
    (tmp_path / "run" / "artifacts" / "models" / "t").mkdir(parents=True)
    write_serving_files(
        folder, target="artifacts/models/t", gamma=2, draft_sample_method="greedy", dtype="float32"
    )
    return folder


def make_vllm(folder: Path, version: str, *, with_repair: bool = True) -> Path:
    """An environment with a stand-in `vllm` of that version; it prints its target and the variables that it was given."""
    venv.EnvBuilder(symlinks=True).create(folder)
    [packages] = folder.glob("lib/python*/site-packages")
    info = packages / f"vllm-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    if with_repair:
        (info / "entry_points.txt").write_text("[vllm.general_plugins]\ndraftsmith_cpu_sampler = os:getcwd\n")
    program = folder / "bin" / "vllm"
    program.write_text(
        '#!/bin/sh\necho "target=$2"\nunset_text="(unset)"\n'
        + "".join(f'echo "{name}=${{{name}-$unset_text}}"\n' for name in SHOWN)
    )
    program.chmod(0o755)
    return program


def start(script: Path, cwd: Path, **variables: str) -> tuple[int, dict[str, str], str]:
    """Exit code, the `name=value` lines of the output, and what went to stderr."""
    done = subprocess.run(
        [str(script)], cwd=cwd, env={"PATH": "/usr/bin:/bin", **variables}, capture_output=True, text=True, check=False
    )  # fmt: skip
    return done.returncode, dict(line.split("=", 1) for line in done.stdout.splitlines()), done.stderr


def test_target_and_vllm_are_found_above_the_script_from_anywhere(tmp_path: Path, export: Path) -> None:
    """The report's target is named from the folder in which the run started; .venv-vllm lies there, too."""
    make_vllm(tmp_path / "run" / ".venv-vllm", "0.32.0")
    latest = tmp_path / "latest"
    latest.symlink_to(export)
    for cwd in (tmp_path / "run", Path("/")):
        code, said, _ = start(latest / "serve.sh", cwd)
        assert (code, said["target"]) == (0, str(tmp_path / "run" / "artifacts" / "models" / "t"))


@pytest.mark.parametrize("script", ["serve.sh", "sglang.sh", "tensorrt_llm.sh"])
def test_a_missing_target_is_said_before_anything_starts(tmp_path: Path, export: Path, script: str) -> None:
    (tmp_path / "run" / "artifacts" / "models" / "t").rmdir()
    code, _, error = start(export / script, tmp_path)
    assert code == 2 and "artifacts/models/t is not here" in error and "TARGET=" in error
    assert start(export / script, tmp_path, TARGET="/no/such folder")[0] == 2


def test_an_ids_target_is_the_cached_folder_here_and_the_id_elsewhere(tmp_path: Path) -> None:
    """A run reads an id's files from the Hub's cache; the export is copied to a machine without that cache."""
    cache, folder = tmp_path / "hub" / "snapshots" / "abc", tmp_path / "export"
    cache.mkdir(parents=True)
    (folder / "draft").mkdir(parents=True)
    settings = {"gamma": 2, "draft_sample_method": "greedy", "dtype": "float32"}
    write_serving_files(folder, target=str(cache), hub_id="org/model", **settings)
    program = make_vllm(tmp_path / "env", "0.32.0")
    assert start(folder / "serve.sh", tmp_path, VLLM=str(program))[1]["target"] == str(cache)
    cache.rmdir()
    assert start(folder / "serve.sh", tmp_path, VLLM=str(program))[1]["target"] == "org/model"
    assert start(folder / "serve.sh", tmp_path, VLLM=str(program), TARGET=str(tmp_path / "none"))[0] == 2
    assert "'org/model'" in (folder / "assisted_generation.py").read_text()


def test_a_folder_with_one_slash_is_found_above_the_script(tmp_path: Path) -> None:
    """`target.path=models/mine` looks like an id."""
    folder, target = tmp_path / "run" / "export", tmp_path / "run" / "models" / "mine"
    (folder / "draft").mkdir(parents=True)
    target.mkdir(parents=True)
    write_serving_files(folder, target="models/mine", gamma=2, draft_sample_method="greedy", dtype="float32")
    program = make_vllm(tmp_path / "env", "0.32.0")
    assert start(folder / "serve.sh", Path("/"), VLLM=str(program))[1]["target"] == "models/mine"  # holds no model
    (target / "config.json").write_text("{}")
    assert start(folder / "serve.sh", Path("/"), VLLM=str(program))[1]["target"] == str(target)


def test_a_missing_vllm_is_said(tmp_path: Path, export: Path) -> None:
    code, _, error = start(export / "serve.sh", tmp_path)
    assert code == 2 and "VLLM=/path/to/bin/vllm" in error


def test_a_cpu_build_gets_what_our_own_servers_get(
    tmp_path: Path, export: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = make_vllm(tmp_path / "env", "0.32.0+cpu")
    openmp = tmp_path / "env" / "lib" / "libiomp5.so"
    openmp.write_text("no library; the loader says so and goes on")
    code, said, error = start(export / "serve.sh", tmp_path, VLLM=str(program))
    assert code == 0 and "warning" not in error
    monkeypatch.setattr("specdec_runtime.backends.vllm_cpu.is_cpu_build", lambda: True)
    monkeypatch.setattr("sys.prefix", str(tmp_path / "env"))
    for name in SHOWN:
        monkeypatch.delenv(name, raising=False)
    ours = cpu_settings()
    assert said["LD_PRELOAD"] == ours["LD_PRELOAD"] == str(openmp)
    assert said["VLLM_CPU_OMP_THREADS_BIND"] == ours.get("VLLM_CPU_OMP_THREADS_BIND", "(unset)")
    memory_gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    assert 1 <= int(said["VLLM_CPU_KVCACHE_SPACE"]) <= max(1, memory_gib / 4)


def test_what_the_user_has_set_stays(tmp_path: Path, export: Path) -> None:
    program = make_vllm(tmp_path / "env", "0.32.0+cpu")
    given = {"VLLM_CPU_KVCACHE_SPACE": "7", "VLLM_CPU_OMP_THREADS_BIND": "0"}
    _, said, _ = start(export / "serve.sh", tmp_path, PATH=f"{program.parent}:/usr/bin:/bin", **given)
    assert {name: said[name] for name in given} == given


def test_a_gpu_build_gets_nothing(tmp_path: Path, export: Path) -> None:
    program = make_vllm(tmp_path / "env", "0.32.0")
    code, said, error = start(export / "serve.sh", tmp_path, VLLM=str(program))
    assert code == 0 and not error
    assert {said[name] for name in SHOWN} == {"(unset)"}


def test_a_cpu_build_without_the_repair_is_warned_about(tmp_path: Path, export: Path) -> None:
    program = make_vllm(tmp_path / "env", "0.32.0+cpu", with_repair=False)
    code, _, error = start(export / "serve.sh", tmp_path, VLLM=str(program))
    assert code == 0 and "temperature 0 only" in error


def test_the_scripts_are_plain_sh(export: Path) -> None:
    for script in export.glob("*.sh"):
        subprocess.run(["sh", "-n", shlex.quote(str(script))], check=True)
        assert script.read_text().startswith("#!/bin/sh\n")
