#!/usr/bin/env bash
# What a CUDA machine says about this repository, in under 8 minutes: see scripts/gpu_check.py.
# usage: scripts/gpu_check.sh [--output FOLDER] [--device cuda|cpu]     (PYTHON=... chooses the interpreter)
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [[ -z "${PYTHON:-}" ]]; then
    PYTHON=python3
    [[ -x "$root/.venv/bin/python" ]] && PYTHON="$root/.venv/bin/python"
fi
PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" exec "$PYTHON" "$root/scripts/gpu_check.py" "$@"
