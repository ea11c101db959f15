#!/usr/bin/env bash
# The main job from nothing: set everything up, then ask a real model at tensor parallelism 2.
#   bash launch/demo.sh [distmk generate options]
set -euo pipefail
ROOT=$(cd "$(dirname "$0")/.." && pwd)
source "$ROOT/scripts/venv.sh"

venv_with demo
fetch_model
prompt="What is photosynthesis? Answer in one sentence."
say "distmk generate --ranks 2 --chat --prompt '$prompt' (the runtime is compiled on first use)"
"$PYTHON" -m distmk generate --model "$MODEL" --ranks 2 --chat --max-new-tokens 60 --prompt "$prompt" "$@"
say "done"
