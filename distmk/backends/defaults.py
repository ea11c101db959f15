"""What the engine chooses where the user leaves it open: backend, longest sequence, workers."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Literal, TypedDict

from distmk.backends.base import require_warps
from distmk.backends.host.backend import usable_cores
from distmk.bootstrap import Bootstrap
from distmk.errors import UsageError

BACKENDS = ("auto", "host", "cuda", "emulated")
EMULATED_WORKERS = 4  # of a rank, all on one core
DEFAULT_MODEL_LEN = 4096  # tokens; the KV cache becomes real memory only as it is used
CUDA_PACKAGES = {"torch": "torch", "cuda": "cuda-python", "nvshmem": "nvshmem4py-cu13"}


def choose_backend(wanted: str) -> str:
    """The backend to use: cuda where it can run, else host. UsageError where the one asked for cannot run here."""
    if wanted in ("host", "emulated"):
        return wanted
    missing = why_no_cuda()
    if missing and wanted == "cuda":
        raise UsageError(f"the cuda backend cannot run here: {missing}; or use --backend host")
    return "host" if missing else "cuda"


def why_no_cuda() -> str | None:
    """What keeps the cuda backend from running here, if anything; imports nothing large."""
    if not Path("/proc/driver/nvidia").exists() and not Path("/dev/nvidiactl").exists():
        return "no NVIDIA GPU on this machine"
    absent = [package for module, package in CUDA_PACKAGES.items() if importlib.util.find_spec(module) is None]
    return f"{', '.join(absent)} not installed; pip install 'distmk[cuda]'" if absent else None


class BackendChoices(TypedDict):
    """Those of DecodeOptions that follow from the backend."""

    tiled: bool
    min_split: int
    attention_launch: Literal["massive", "spread"]


def backend_choices(backend: str) -> BackendChoices:
    """How a program is compiled for a backend: as its task bodies read weights, and as handing out tasks costs there."""
    if backend == "host":
        return {"tiled": False, "min_split": 64, "attention_launch": "massive"}
    # Handing out costs a GPU some microseconds a layer.
    return {"tiled": True, "min_split": 64, "attention_launch": "spread"}


def choose_model_len(wanted: int | None, max_position: int) -> int:
    """The longest sequence to serve: what was asked for, if the model's context has room for it."""
    if wanted is not None and wanted > max_position:
        raise UsageError(f"max_model_len {wanted} is more than the model's context of {max_position} tokens")
    return min(max_position, DEFAULT_MODEL_LEN) if wanted is None else wanted


def check_heads(head_dim: int, backend: str) -> None:
    """UsageError where a GPU's kernel cannot take heads of this size."""
    if backend != "host" and (head_dim % 8 or head_dim > 128):
        raise UsageError(
            f"the model's head_dim is {head_dim}; on a GPU it must be a multiple of 8, at most 128; use --backend host"
        )


def choose_workers(wanted: int | None, backend: str, bootstrap: Bootstrap, schedulers_apart: bool = False) -> int:
    """Workers of a rank: what was asked for, or one an SM, or the share of the cores. Warns where cores must be shared.

    `schedulers_apart`: on a GPU one SM is theirs.
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
        print(
            f"distmk: warning: {bootstrap.local_size} ranks x {wanted} workers are more than the {cores} cores "
            "available here; workers will take turns and decode slowly",
            file=sys.stderr,
        )
    return wanted


def check_schedulers(wanted: int | None, num_workers: int, backend: str) -> None:
    """UsageError where there is no room for schedulers apart from the workers."""
    if wanted is None:
        return
    if wanted > num_workers:
        raise UsageError(f"{wanted} schedulers are more than {num_workers} workers; ask for at most one a worker")
    if backend != "host":
        require_warps(wanted)
