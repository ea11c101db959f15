#!/usr/bin/env bash
# Everything that must hold: formatting, types, the generated header, and the tests. Arguments go to pytest.
set -euo pipefail
ROOT=$(cd "$(dirname "$0")/.." && pwd)
cd "$ROOT"
source "$ROOT/scripts/venv.sh"

venv_with test
fetch_model
export DISTMK_TEST_GGUF=$MODEL
if [ $# -eq 0 ]; then
  say "ruff, mypy, clang-format, csrc/abi.h"
  ruff check .
  ruff format --check .
  mypy
  git ls-files 'csrc/*.h' 'csrc/*.cpp' 'csrc/*.cuh' 'csrc/*.cu' 'examples/*.cu' 'examples/*.cuh' ':!csrc/abi.h' | xargs clang-format --dry-run --Werror
  "$PYTHON" scripts/gen_abi.py --check
fi
say "pytest"
"$PYTHON" -m pytest -q "$@"
