"""How this process was started, according to its environment, and the connection that follows from that."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from distmk import parameter_checks
from distmk.abi import MAX_RANKS
from distmk.bootstrap.base import Bootstrap, LauncherKind, Member, read_link_timeout_s, read_timeout_s
from distmk.bootstrap.keys import AUTHKEY_ENV
from distmk.bootstrap.local import RANK_ENV, RENDEZVOUS_ENV, WORLD_SIZE_ENV, join_local, start_local
from distmk.bootstrap.mpi import connect_mpi
from distmk.bootstrap.single import SingleBootstrap
from distmk.bootstrap.slurm import connect_slurm
from distmk.bootstrap.torchrun import StoreAddress, connect_store
from distmk.console import tell
from distmk.env import whole
from distmk.errors import OwnUsageError, UsageError, shown
from distmk.open_files import check_open_files
from distmk.progress import leave_to_rank_0


@dataclass(frozen=True)
class Launch:
    """A launch as the environment describes it.

    `launcher` is its name in messages. `world_size` is None if only the MPI library knows it.
    """

    kind: LauncherKind
    launcher: str
    rank: int
    world_size: int | None
    local_rank: int | None = None
    local_size: int | None = None
    is_follower: bool = False


def detect(num_ranks: int | None = None, env: Mapping[str, str] | None = None) -> LauncherKind:
    """Return how the ranks of this job are started. Starts and joins nothing.

    `num_ranks` is the number of ranks that the user asked for; `env` is the environment, by default this process's.
    Raises UsageError if the environment contradicts itself or `num_ranks`.
    """
    return read_launch(num_ranks, os.environ if env is None else env).kind


def connect(
    num_ranks: int | None = None,
    *,
    follower_argv: Sequence[str] | None = None,
    timeout_s: float | None = None,
    env: Mapping[str, str] | None = None,
) -> Bootstrap:
    """Join the ranks of this job; without a launcher, start `num_ranks` - 1 followers first.

    `follower_argv` is the command of a follower, by default `python -m distmk.cli.worker_process`. `timeout_s` bounds
    every blocking call, by default DISTMK_BOOTSTRAP_TIMEOUT_S or 300 s. Raises UsageError as `detect` does.
    OwnUsageError, which the other ranks do not learn: the ranks cannot be started or reached. RankLostError: a rank
    ends or does not join in time.
    """
    try:
        return _join(num_ranks, follower_argv, timeout_s, os.environ if env is None else env)
    except UsageError as error:
        raise OwnUsageError(str(error)) from None


def _join(
    num_ranks: int | None, follower_argv: Sequence[str] | None, timeout_s: float | None, env: Mapping[str, str]
) -> Bootstrap:
    launch = read_launch(num_ranks, env)
    if timeout_s is None:
        timeout_s = read_timeout_s(env)
    read_link_timeout_s(env)  # refused here, before anything is started
    if not launch.is_follower:  # a follower has the same limit as rank 0
        check_open_files(launch.world_size or 1)
    bootstrap = _connect(launch, follower_argv, timeout_s, env)
    tell(f"rank {bootstrap.rank} of {bootstrap.world_size} ({launch.launcher})", "debug")
    if bootstrap.rank:
        leave_to_rank_0()
    try:
        check_size(num_ranks, bootstrap.world_size, launch.launcher)
    except UsageError:
        bootstrap.close()
        raise
    return bootstrap


def _connect(
    launch: Launch, follower_argv: Sequence[str] | None, timeout_s: float, env: Mapping[str, str]
) -> Bootstrap:
    if launch.kind == "mpi":
        return connect_mpi("mpi", launch.world_size, launch.local_rank, launch.local_size, timeout_s)
    if launch.kind == "single" or launch.world_size is None:
        return SingleBootstrap(timeout_s, launch.local_rank, launch.local_size)
    if launch.kind == "local":
        if launch.is_follower:
            return join_local(launch.rank, launch.world_size, env, timeout_s)
        return start_local(launch.world_size, follower_argv, env, timeout_s)
    member = Member(launch.kind, launch.rank, launch.world_size, launch.local_rank, launch.local_size)
    if launch.kind == "slurm":
        return connect_slurm(member, env, timeout_s)
    hosted_by_agent = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    attempt = env.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = StoreAddress(env["MASTER_ADDR"], _read_int(env, "MASTER_PORT"), hosted_by_agent, attempt)
    return connect_store(member, store, timeout_s)


def read_launch(num_ranks: int | None, env: Mapping[str, str]) -> Launch:
    """Read this process's rank and launcher. The first launcher found has precedence. Raises UsageError as `detect` does.

    A launcher of one process counts as no launcher: it is often a container's default, and the ranks are then started
    from here. If one rank is asked for, it is alone whatever started the process, for example in a program whose
    processes have a model each.
    """
    if num_ranks is not None:
        num_ranks = parameter_checks.whole("the number of ranks", num_ranks, 1, MAX_RANKS, f"1 to {MAX_RANKS}")
    follower = _read_follower(env)
    if num_ranks == 1 and follower is None:
        return _alone(env)
    for launch in (follower, *(read(env) for read in (_read_torch, _read_mpi, _read_slurm) if follower is None)):
        if launch is not None and launch.world_size != 1:
            check_size(num_ranks, launch.world_size, launch.launcher)
            return launch
    if num_ranks is not None and num_ranks > 1:
        return Launch("local", "--ranks", 0, num_ranks)
    return Launch("single", "no launcher", 0, 1)


def _alone(env: Mapping[str, str]) -> Launch:
    """One rank alone. If a launcher started this process among others, the rank shares its host with them, and has its
    own GPU and cores.
    """
    try:
        launch = read_launch(None, env)
    except UsageError:  # errors in the variables do not matter here
        return Launch("single", "no launcher", 0, 1)
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if launch.local_rank is None or launch.local_size is None:
        return Launch("single", launch.launcher, 0, 1)
    if visible is not None and len(visible.split(",")) < launch.local_size:  # each process is given GPUs of its own
        return Launch("single", launch.launcher, 0, 1)
    return Launch("single", launch.launcher, 0, 1, launch.local_rank, launch.local_size)


def check_size(num_ranks: int | None, world_size: int | None, launcher: str) -> None:
    """UsageError: the number of ranks that was asked for is not the number that was started."""
    if num_ranks is not None and world_size is not None and num_ranks != world_size:
        started = "1 rank" if world_size == 1 else f"{world_size} ranks"
        raise UsageError(
            f"--ranks {num_ranks} was given, but {launcher} started {started}; leave --ranks (tensor_parallel_size) out "
            "under a launcher, give the same number, or in a script tensor_parallel_size=1 for a model in each process"
        )


def _read_follower(env: Mapping[str, str]) -> Launch | None:
    if RANK_ENV not in env:
        return None
    missing = [name for name in (WORLD_SIZE_ENV, RENDEZVOUS_ENV, AUTHKEY_ENV) if name not in env]
    if missing:
        raise UsageError(f"{RANK_ENV} is set but {', '.join(missing)} is not; rank 0 sets them all, users none")
    rank, world_size = _read_rank_and_size(env, RANK_ENV, WORLD_SIZE_ENV)
    if rank == 0:
        raise UsageError(f"{RANK_ENV} must be at least 1: rank 0 is the process that starts the others")
    return Launch("local", "rank 0", rank, world_size, is_follower=True)


def _read_torch(env: Mapping[str, str]) -> Launch | None:
    if "RANK" not in env and "WORLD_SIZE" not in env:
        return None
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in names if not env.get(name)]
    if missing:
        given = [name for name in names if name not in missing]
        # Scripts under mpirun or srun often set some of these for other programs, and containers set a size of 1.
        if env.get("WORLD_SIZE") == "1" or (_read_mpi(env) or _read_slurm(env)) is not None:
            return None
        raise UsageError(
            f"{', '.join(given) or 'RANK'} set without {', '.join(missing)}: "
            "torchrun sets all of RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; unset them, or set them all"
        )
    rank, world_size = _read_rank_and_size(env, "RANK", "WORLD_SIZE")
    if not 0 < _read_int(env, "MASTER_PORT") < 65536:
        raise UsageError(f"MASTER_PORT must be a port number, got {shown(env['MASTER_PORT'])}")
    local_rank = local_size = None
    if "LOCAL_RANK" in env and "LOCAL_WORLD_SIZE" in env:
        local_rank, local_size = _read_rank_and_size(env, "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    elif "LOCAL_RANK" in env:
        local_rank = _read_int(env, "LOCAL_RANK")
    launcher = "torchrun" if "TORCHELASTIC_RUN_ID" in env else "the launcher (WORLD_SIZE)"
    return Launch("torch", launcher, rank, world_size, local_rank, local_size)


def _read_mpi(env: Mapping[str, str]) -> Launch | None:
    for rank_name, size_name in (("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE")):
        if rank_name not in env and size_name not in env:
            continue
        if rank_name == "PMI_RANK" and _is_srun_pmi(env):
            return None
        rank, world_size = _read_rank_and_size(env, rank_name, size_name)
        return Launch("mpi", "the MPI launcher", rank, world_size, *_read_mpi_local(env))
    if "PMIX_RANK" in env and not _in_slurm_step(env):
        return Launch("mpi", "the MPI launcher", _read_int(env, "PMIX_RANK"), None)
    return None


def _read_mpi_local(env: Mapping[str, str]) -> tuple[int | None, int | None]:
    """Local rank and size in the variables of Open MPI, or of MPICH and Intel MPI."""
    for names in (("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"), ("MPI_LOCALRANKID", "MPI_LOCALNRANKS")):
        if all(name in env for name in names):
            return _read_rank_and_size(env, *names)
    return None, None


def _is_srun_pmi(env: Mapping[str, str]) -> bool:
    """Whether srun itself set the PMI variables, rather than an mpiexec whose proxies srun started."""
    same_rank = env.get("PMI_RANK") == env.get("SLURM_PROCID")
    return same_rank and env.get("PMI_SIZE") == env.get("SLURM_STEP_NUM_TASKS")


def _in_slurm_step(env: Mapping[str, str]) -> bool:
    return "SLURM_PROCID" in env and "SLURM_STEP_NUM_TASKS" in env


def _read_slurm(env: Mapping[str, str]) -> Launch | None:
    # The script of sbatch and the shell of salloc also have SLURM_PROCID and SLURM_NTASKS, for tasks that could be
    # started. Only srun sets the variables of a step.
    if not _in_slurm_step(env):
        return None
    rank, world_size = _read_rank_and_size(env, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
    local_rank = _read_int(env, "SLURM_LOCALID") if "SLURM_LOCALID" in env else None
    local_size = world_size if env.get("SLURM_STEP_NUM_NODES") == "1" else None
    return Launch("slurm", "srun", rank, world_size, local_rank, local_size)


def _read_rank_and_size(env: Mapping[str, str], rank_name: str, size_name: str) -> tuple[int, int]:
    for name, other in ((rank_name, size_name), (size_name, rank_name)):
        if name not in env:
            raise UsageError(f"{other} is set but {name} is not; start the ranks with one launcher, or unset {other}")
    rank, size = _read_int(env, rank_name), _read_int(env, size_name)
    if not 0 <= rank < size:
        raise UsageError(f"{rank_name} must be below {size_name} and not negative, got {rank} of {size}")
    return rank, size


def _read_int(env: Mapping[str, str], name: str) -> int:
    value = whole(env[name])
    if value is None:
        raise UsageError(f"{name} must be a whole number, got {shown(env[name])}")
    return value
