"""The other ranks of this host that a launcher started, as far as this process can know without a connection."""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Mapping

_RANK_ENVS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")
_JOB_ENVS = (
    *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
    *("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "SLURM_JOB_ID", "SLURM_STEP_ID"),
)
"""Variables that have the same value on all ranks of a job."""

_claims: list[socket.socket] = []


def may_exist(env: Mapping[str, str] = os.environ) -> bool:
    """Whether a launcher started this process, perhaps among others."""
    return any(name in env for name in _RANK_ENVS)


def is_first_to_say(text: str, env: Mapping[str, str] = os.environ) -> bool:
    """Whether no other rank of this host says `text`. True on one of them, as long as that rank runs.

    The claim is a name in the kernel's table of abstract Unix sockets. One process at a time can have it, and it is
    gone with the process.
    """
    job = [env.get(name, "") for name in _JOB_ENVS]
    digest = hashlib.sha256(repr((os.getuid(), job if any(job) else os.getppid(), text)).encode()).hexdigest()
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claim.bind(f"\0distmk-says-{digest}")
    except OSError:
        claim.close()
        return False
    _claims.append(claim)
    return True
