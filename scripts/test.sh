#!/usr/bin/env bash
# Everything that must hold: formatting, types, the generated header, and the tests.
#   bash scripts/test.sh fast   in about four minutes on two cores: a few cases of every test that starts no process, and no mypy
#   bash scripts/test.sh        the whole, without the tests marked slow, which compile variants of their own
#   bash scripts/test.sh ...    arguments for pytest, such as `-m slow`
set -euo pipefail
ROOT=$(cd "$(dirname "$0")/.." && pwd)
cd "$ROOT"
source "$ROOT/scripts/venv.sh"

venv_with test
fetch_model
export DISTMK_TEST_GGUF=$MODEL
# Tests start hundreds of Python processes, which would compile all modules each.
unset PYTHONDONTWRITEBYTECODE
MYPY=
if [ $# -eq 0 ] || [ "$*" = fast ]; then
  say "ruff, clang-format, csrc/abi.h"
  ruff check .
  ruff format --check .
  git ls-files 'csrc/*.h' 'csrc/*.cpp' 'csrc/*.cuh' 'csrc/*.cu' 'examples/*.cu' 'examples/*.cuh' ':!csrc/abi.h' | xargs clang-format --dry-run --Werror
  "$PYTHON" scripts/gen_abi.py --check
fi
if [ "$*" = fast ]; then
  set -- -n 2 --dist loadfile --fast
elif [ $# -eq 0 ]; then
  say "mypy beside pytest"
  TYPES=$(mktemp)
  trap 'kill "$MYPY" 2>/dev/null || true; rm -f "$TYPES"' EXIT
  mypy >"$TYPES" 2>&1 &
  MYPY=$!
  # Three modules at a time, as tests of several processes mostly wait. In their order, those with many short tests are last.
  set -- -n 3 --dist loadfile --no-loadscope-reorder --drawn -m "not slow"
fi
say "pytest"
STATUS=0
"$PYTHON" -m pytest -q "$@" || STATUS=$?
[ -z "$MYPY" ] || wait "$MYPY" || { cat "$TYPES"; STATUS=1; }
exit $STATUS
