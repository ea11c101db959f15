#!/usr/bin/env bash
# Run distmk on N ranks of this host under torchrun.
#   bash launch/torchrun.sh N distmk-args...
# On several hosts N is the ranks of each; set NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT (see launch/README.md).
set -euo pipefail

if [[ $# -lt 2 || ! $1 =~ ^[1-9][0-9]*$ ]]; then
    echo "usage: bash launch/torchrun.sh N distmk-args..." >&2
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
    python=$(command -v python3) || { echo "torchrun.sh: no python3 found" >&2; exit 2; }
fi

# NVLink multicast is never needed here, and can disturb other users of the host.
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
# torchrun sets this to 1 with a warning unless it is set; the runtime makes its own threads.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

if [[ ${NNODES:-1} -gt 1 ]]; then
    : "${NODE_RANK:?torchrun.sh: several hosts need NODE_RANK: 0 on the first host, 1 on the next}"
    : "${MASTER_ADDR:?torchrun.sh: several hosts need MASTER_ADDR: the name of the first host}"
    where=(--nnodes "$NNODES" --node-rank "$NODE_RANK" --master-addr "$MASTER_ADDR"
        --master-port "${MASTER_PORT:-29500}")
else
    where=(--standalone --nnodes 1)
fi

# -m distmk is torchrun's way to say `python -m distmk`.
exec "$python" -m torch.distributed.run "${where[@]}" --nproc-per-node "$ranks" -m distmk "$@"
