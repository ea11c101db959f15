#!/usr/bin/env bash
# The main job from nothing: set everything up, then generate text with a real model at tensor parallelism 2.
#   bash launch/demo.sh [distmk generate options]
set -euo pipefail
ROOT=$(cd "$(dirname "$0")/.." && pwd)
source "$ROOT/scripts/venv.sh"

venv_with demo
fetch_model
prompt="Photosynthesis is the process by which"
say "distmk generate --ranks 2 --prompt '$prompt' (the runtime is compiled on first use)"
"$PYTHON" -m distmk generate --model "$MODEL" --ranks 2 --max-new-tokens 25 --echo --prompt "$prompt" "$@"
say "done"
