"""Defaults for what the user leaves open: backend, maximum model length, number of workers; and limits on what is given."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Literal, TypedDict

from distmk import env
from distmk.abi import MAX_ROWS, WIDE_ROWS
from distmk.backends.base import require_warps
from distmk.backends.cuda.packages import CUDA_PACKAGES, INSTALL_CUDA
from distmk.backends.host.backend import usable_cores
from distmk.bootstrap import Bootstrap
from distmk.console import tell
from distmk.errors import UsageError, shown
from distmk.model.config import ModelConfig

BACKENDS = ("auto", "host", "cuda", "emulated")
EMULATED_WORKERS = 4  # of a rank; all run on one core
DEFAULT_MODEL_LEN = 4096  # tokens; pages of the KV cache take memory only once they are used


def choose_backend(wanted: str) -> str:
    """The backend for `wanted`: auto is cuda if that can run here, else host. UsageError: `wanted` cannot run here."""
    if wanted in ("host", "emulated"):
        return wanted
    missing = why_no_cuda()
    if missing and wanted == "cuda":
        raise UsageError(f"the cuda backend cannot run here: {missing}; or use --backend host")
    return "host" if missing else "cuda"


NO_GPU = "no NVIDIA GPU on this machine"


def why_no_cuda() -> str | None:
    """Why the cuda backend cannot run here; None if it can. Imports nothing large."""
    if not Path("/proc/driver/nvidia").exists() and not Path("/dev/nvidiactl").exists():
        return NO_GPU
    absent = [
        package
        for module, package in CUDA_PACKAGES.items()
        if importlib.util.find_spec(module.partition(".")[0]) is None
    ]
    return f"{', '.join(absent)} not installed; {INSTALL_CUDA}" if absent else None


class BackendChoices(TypedDict):
    """The DecodeOptions that follow from the backend."""

    tiled: bool
    min_split: int
    attention_launch: Literal["massive", "spread"]


def backend_choices(backend: str) -> BackendChoices:
    """Options of a program for a backend: how its task bodies read weights, and how attention is launched."""
    if backend == "host":
        return {"tiled": False, "min_split": 64, "attention_launch": "massive"}
    # On a GPU, dispatching attention would cost some microseconds a layer.
    return {"tiled": True, "min_split": 64, "attention_launch": "spread"}


def choose_model_len(wanted: int | None, config: ModelConfig) -> int:
    """The longest sequence in tokens. UsageError: `wanted` exceeds the model's context."""
    if wanted is not None and wanted > config.max_position:
        raise UsageError(f"max_model_len {wanted} is more than the model's context of {config.max_position} tokens")
    return min(config.max_position, DEFAULT_MODEL_LEN) if wanted is None else wanted


def check_heads(head_dim: int, backend: str) -> None:
    """UsageError if the kernel of a GPU does not support heads of this size."""
    if backend != "host" and (head_dim % 8 or head_dim > 128):
        raise UsageError(
            f"the model's head_dim is {head_dim}; on a GPU it must be a multiple of 8, at most 128; use --backend host"
        )


def choose_workers(wanted: int | None, backend: str, bootstrap: Bootstrap, schedulers_apart: bool = False) -> int:
    """Workers of a rank: `wanted`, or one for each SM, or for each of the rank's cores. Warns if workers must share cores.

    `schedulers_apart`: on a GPU, one SM is reserved for schedulers.
    """
    if backend == "cuda":
        from distmk.backends.cuda.gpus import num_sms_of  # needs packages that only GPU machines have

        return wanted or num_sms_of(bootstrap.local_rank) - int(schedulers_apart)
    if backend == "emulated":
        return wanted or EMULATED_WORKERS
    cores = usable_cores()
    if wanted is None:
        return max(1, cores // bootstrap.local_size)
    if wanted * bootstrap.local_size > cores and bootstrap.local_rank == 0:
        tell(
            f"warning: {bootstrap.local_size} ranks x {wanted} workers are more than the {cores} cores "
            "available here; workers will share cores and decode slowly"
        )
    return wanted


def choose_turns(
    wanted: int | None, backend: str, bootstrap: Bootstrap, *, is_traced: bool, schedulers_apart: bool, num_hosts: int
) -> tuple[int, ...]:
    """Token rows of an iteration of each program that takes turns (`DecodeOptions.turns`). wanted: at most so many; None:
    WIDE_ROWS.

    A narrow program alone where there are no wide iterations: across hosts, with schedulers of their own, in a launch in pieces,
    in a trace, on GPUs before Hopper; and in the emulator, which would take minutes. UsageError: `wanted` is out of range, or
    DISTMK_TURNS asks for what there is not.
    """
    if wanted is not None and not MAX_ROWS <= wanted <= WIDE_ROWS:
        raise UsageError(
            f"max_num_batched_tokens is {shown(wanted)}; an iteration carries {MAX_ROWS} to {WIDE_ROWS} tokens"
        )
    obstacles = {
        "several hosts": num_hosts > 1,
        "schedulers of their own": schedulers_apart,
        "DISTMK_LAUNCH_ITERATIONS": bool(env.launch_iterations()),
        "DISTMK_VIRTUAL_NODE_SIZE": bool(env.virtual_node_size()),
        "GPUs before Hopper": backend == "cuda" and not _is_wide(bootstrap),
    }
    if (turns := env.turns()) is not None:
        obstacles["a trace, which is of one program"] = is_traced and len(turns) > 1
        met = [obstacle for obstacle, is_met in obstacles.items() if is_met]
        if turns != (MAX_ROWS,) and met:
            raise UsageError(f"DISTMK_TURNS asks for {turns}, but there are no such iterations with {met[0]}; unset it")
        return turns
    if wanted == MAX_ROWS or is_traced or any(obstacles.values()) or backend == "emulated":
        return (MAX_ROWS,)
    return (MAX_ROWS, wanted or WIDE_ROWS)


def _is_wide(bootstrap: Bootstrap) -> bool:
    from distmk.backends.cuda.gpus import has_wide_iterations  # needs packages that only GPU machines have

    return has_wide_iterations(bootstrap.local_rank)


def check_schedulers(wanted: int | None, num_workers: int, backend: str) -> None:
    """UsageError if `wanted` schedulers of their own are more than there is room for."""
    if wanted is None:
        return
    if wanted > num_workers:
        raise UsageError(f"{wanted} schedulers are more than {num_workers} workers; ask for at most one a worker")
    if backend != "host":
        require_warps(wanted)
