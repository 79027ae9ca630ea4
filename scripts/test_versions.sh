#!/bin/bash
# Run the tests of export, engines and runtime on the lowest and the highest Transformers that pyproject.toml allows.
# Each version goes into a folder of its own that is put before .venv's; nothing in .venv changes.
set -euo pipefail
cd "$(dirname "$0")/.."
versions=${VERSIONS:-5.16 5.19}
tests=${TESTS:-tests/unit/pipeline/test_export.py tests/unit/pipeline/test_compat.py tests/unit/pipeline/test_gguf_export.py tests/unit/pipeline/test_head_rows.py tests/unit/pipeline/test_run_export.py tests/integration/test_doctor.py tests/unit/pipeline/test_models.py tests/unit/pipeline/test_embedded_target.py tests/unit/runtime/test_losslessness_greedy.py tests/unit/runtime/test_hf_backends.py tests/unit/runtime/test_steps.py}
python=$PWD/.venv/bin/python
failed=()
for version in $versions; do
  folder=$PWD/.versions/transformers-$version
  if [ ! -e "$folder/.complete" ]; then
    rm -rf "$folder"
    mkdir -p .versions
    # Its own dependencies come along: an old Transformers takes another hub client than .venv has. torch is none of them.
    grep -viE '^(transformers|huggingface)' constraints.txt > "$folder.constraints"
    "$python" -m pip install -q --disable-pip-version-check -c "$folder.constraints" --target "$folder" "transformers==$version.*"
    touch "$folder/.complete"
  fi
  PYTHONPATH=$folder${PYTHONPATH:+:$PYTHONPATH} "$python" -c 'import transformers; print("transformers", transformers.__version__)'
  # shellcheck disable=SC2086
  PYTHONPATH=$folder${PYTHONPATH:+:$PYTHONPATH} "$python" -m pytest -q -m "not gpu and not vllm and not slow" $tests "$@" || failed+=("$version")
done
if [ ${#failed[@]} -gt 0 ]; then
  echo "failed with transformers ${failed[*]}" >&2
  exit 1
fi
echo "passed with transformers $versions"
