#!/usr/bin/env bash
# Run distmk on N ranks of this host under torchrun.
#   bash launch/torchrun.sh N distmk-args...
# On several hosts N is the number of ranks per host; set NNODES, and either NODE_RANK, MASTER_ADDR, MASTER_PORT or, so that
# torchrun numbers the hosts, RDZV_ENDPOINT (launch/README.md).
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

if ! "$python" -c 'import sys, importlib.util as u; sys.exit(u.find_spec("torch") is None)'; then
    echo "torchrun.sh: $python has no torch: $python -m pip install torch, or use --ranks $ranks or launch/mpirun.sh" >&2
    exit 2
fi

# NVLink multicast is never needed here, and can disturb other users of the host.
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
# Unset, torchrun would set this to 1 with a warning. The runtime makes its own threads.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

if [[ ${NNODES:-1} -gt 1 && -z ${DISTMK_AUTHKEY:-}${DISTMK_AUTHKEY_FILE:-}${DISTMK_UNAUTHENTICATED_BIND:-} ]]; then
    echo "torchrun.sh: several hosts need the same DISTMK_AUTHKEY on each, made once by" \
        "\`python3 -c \"import secrets; print(secrets.token_hex(32))\"\`" >&2
    exit 2
fi
if [[ ${NNODES:-1} -gt 1 && -n ${RDZV_ENDPOINT:-} ]]; then
    hosts=(--nnodes "$NNODES" --rdzv-backend c10d --rdzv-endpoint "$RDZV_ENDPOINT" --rdzv-id "${RDZV_ID:-distmk}")
elif [[ ${NNODES:-1} -gt 1 ]]; then
    : "${NODE_RANK:?torchrun.sh: several hosts need NODE_RANK: 0 on the first host, 1 on the next}"
    : "${MASTER_ADDR:?torchrun.sh: several hosts need MASTER_ADDR: the name of the first host}"
    hosts=(--nnodes "$NNODES" --node-rank "$NODE_RANK" --master-addr "$MASTER_ADDR"
        --master-port "${MASTER_PORT:-29500}")
else
    hosts=(--standalone --nnodes 1)
fi

# torchrun runs `python -m distmk` on each rank.
exec "$python" -m torch.distributed.run "${hosts[@]}" --nproc-per-node "$ranks" -m distmk "$@"
