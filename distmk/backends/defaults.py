"""Defaults and limits of options: backend, lengths, and numbers of workers and sequences."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Literal, NamedTuple, TypedDict

from distmk import env
from distmk.abi import MAX_BUCKET_ROWS, MAX_HEAD_DIM, MAX_ROWS, MAX_SEQUENCES
from distmk.backends.base import require_warps
from distmk.backends.cuda.packages import CUDA_PACKAGES, INSTALL_CUDA
from distmk.backends.host.backend import usable_cores
from distmk.bootstrap import Bootstrap, agree
from distmk.bootstrap.base import name_ranks
from distmk.bootstrap.messages import gather_json
from distmk.console import tell
from distmk.errors import UsageError, shown
from distmk.model.config import ModelConfig
from distmk.model.rope_scaling import pretraining_length
from distmk.parameter_checks import whole

BACKENDS = ("auto", "host", "cuda", "emulated")
MAX_WORKERS = 4096  # limit for a rank; more are a mistake and would only use up threads
EMULATED_WORKERS = 4  # workers of a rank; all run on one core


def check_backend(name: str) -> None:
    """UsageError if there is no backend of that name."""
    if name not in BACKENDS:
        raise UsageError(f"backend {shown(name)} is not one of {', '.join(BACKENDS)}")


def choose_backend(wanted: str | None) -> str:
    """The backend for `wanted`: auto (or None) is cuda if it can run here, else host.

    UsageError: `wanted` is unknown, or cannot run here.
    """
    wanted = "auto" if wanted is None else wanted
    check_backend(wanted)
    if wanted in ("host", "emulated"):
        return wanted
    missing = why_no_cuda()
    if missing and wanted == "cuda":
        raise UsageError(f"the cuda backend cannot run here: {missing}; or use --backend host")
    return "host" if missing else "cuda"


NO_GPU = "no NVIDIA GPU on this machine"


def why_no_cuda() -> str | None:
    """Why the cuda backend cannot run here; None if it can. This function imports no large package."""
    if not Path("/proc/driver/nvidia").exists() and not Path("/dev/nvidiactl").exists():
        return NO_GPU
    absent = [
        package
        for module, package in CUDA_PACKAGES.items()
        if importlib.util.find_spec(module.partition(".")[0]) is None
    ]
    return f"{', '.join(absent)} not installed; {INSTALL_CUDA}" if absent else None


def agree_on_backend(bootstrap: Bootstrap, wanted: str | None) -> str:
    """The one backend of all ranks; each rank chooses it with `choose_backend`. Collective.

    UsageError on every rank: `wanted` cannot run on some rank, or the ranks choose differently.
    """
    mine = agree(bootstrap, lambda: choose_backend(wanted))
    chosen: list[str] = gather_json(bootstrap, mine, "backend", str)
    if other := next((name for name in chosen if name != chosen[0]), None):
        ranks = [rank for rank, name in enumerate(chosen) if name == other]
        raise UsageError(
            f"the backend is {chosen[0]} on rank 0, but {other} on {name_ranks(ranks)}; give every rank the same --backend"
        )
    return mine


class BackendChoices(TypedDict):
    """The DecodeOptions that follow from the backend."""

    tiled: bool
    min_kv_split_len: int
    attention_launch: Literal["massive", "spread"]
    draft_row_cost: float


def backend_choices(backend: str) -> BackendChoices:
    """Options of a program for a backend: how its task bodies read weights, and how attention is launched."""
    if backend == "host":
        return {"tiled": False, "min_kv_split_len": 64, "attention_launch": "massive", "draft_row_cost": 0.1}
    # On a GPU, dispatching attention would cost several microseconds in each layer.
    return {"tiled": True, "min_kv_split_len": 64, "attention_launch": "spread", "draft_row_cost": 0.016}


def choose_model_len(wanted: int | None, config: ModelConfig) -> int:
    """The longest sequence in tokens: `wanted`, or else the model's context.

    Memory may allow only a part (`with_kv_pages`).

    If a longer context would change the frequencies of short texts, the default is the length of pretraining.
    UsageError: `wanted` exceeds the model's context.
    """
    if wanted is None:
        return min(config.max_position, pretraining_length(config.rope_scaling) or config.max_position)
    if wanted > config.max_position:
        raise UsageError(f"max_model_len {wanted} is more than the model's context of {config.max_position} tokens")
    return wanted


def check_heads(head_dim: int, backend: str) -> None:
    """UsageError if a GPU's kernel does not support heads of this size."""
    if backend != "host" and (head_dim % 8 or head_dim > MAX_HEAD_DIM):
        raise UsageError(
            f"the model's head_dim is {head_dim}; on a GPU it must be a multiple of 8, at most {MAX_HEAD_DIM}; "
            "use --backend host"
        )


def choose_workers(wanted: int | None, backend: str, bootstrap: Bootstrap, schedulers_apart: bool = False) -> int:
    """Workers of a rank: `wanted`, or one for each SM, or one for each of the rank's cores.

    Warns if workers must share cores.

    `schedulers_apart`: on a GPU, one SM is reserved for schedulers. UsageError: `wanted` is not a valid number of
    workers.
    """
    if wanted is not None:
        wanted = whole("num_workers", wanted, 1, MAX_WORKERS, f"1 to {MAX_WORKERS}, or None")
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


def agree_on_workers(bootstrap: Bootstrap, wanted: int | None, backend: str, schedulers_apart: bool = False) -> int:
    """The number of workers of every rank: the least that any rank chooses for itself (`choose_workers`). Collective.

    UsageError: `wanted` is not a valid number of workers.
    """
    mine = agree(bootstrap, lambda: choose_workers(wanted, backend, bootstrap, schedulers_apart))
    least: int = min(gather_json(bootstrap, mine, "number of workers", int))
    return least


class RowBuckets(NamedTuple):
    """`DecodeOptions.row_buckets` of an engine. why_slabs: the reason if there is only the slab program."""

    rows: tuple[int, ...]
    why_slabs: str = ""


def choose_row_buckets(
    wanted: int | None,
    backend: str,
    bootstrap: Bootstrap,
    *,
    is_traced: bool,
    schedulers_apart: bool,
    num_hosts: int,
    deterministic: bool = False,
    cut_blocks: str = "",
) -> RowBuckets:
    """The row buckets of an engine. wanted: the most token rows of an iteration; None: MAX_BUCKET_ROWS.

    cut_blocks: what GPUs cannot multiply in jobs, if matrices stay packed and their shards do not fit; else empty. There
    is only the slab program if job iterations are not possible: across hosts, with schedulers of their own, in a launch
    in pieces, in a trace, on GPUs before Hopper, and on GPUs with such shards. The same holds if all iterations must add
    in the same order (`deterministic`), and in the emulator, where they would take minutes.

    UsageError: `wanted` is out of range, or DISTMK_ROW_BUCKETS asks for buckets that are not possible.
    """
    if wanted is not None:
        expected = f"{MAX_ROWS} to {MAX_BUCKET_ROWS}, the tokens that an iteration carries"
        wanted = whole("max_num_batched_tokens", wanted, MAX_ROWS, MAX_BUCKET_ROWS, expected)
    obstacles = {
        "several hosts": num_hosts > 1,
        "deterministic": deterministic,
        "schedulers of their own": schedulers_apart,
        "DISTMK_LAUNCH_ITERATIONS": bool(env.launch_iterations()),
        "DISTMK_VIRTUAL_NODE_SIZE": bool(env.virtual_node_size()),
        cut_blocks: bool(cut_blocks) and backend != "host",
        "GPUs before Hopper": backend == "cuda" and not _has_jobs(bootstrap),
    }
    if (buckets := env.row_buckets()) is not None:
        obstacles["a trace, which is of one program"] = is_traced and len(buckets) > 1
        met = [obstacle for obstacle, is_met in obstacles.items() if is_met]
        if buckets != (MAX_ROWS,) and met:
            raise UsageError(
                f"DISTMK_ROW_BUCKETS asks for {buckets}, but there are no such iterations with {met[0]}; unset it"
            )
        return RowBuckets(buckets, f"DISTMK_ROW_BUCKETS={MAX_ROWS}" if buckets == (MAX_ROWS,) else "")
    obstacles |= {
        "a trace": is_traced,
        f"max_num_batched_tokens={MAX_ROWS}": wanted == MAX_ROWS,
        "the emulator": backend == "emulated",
    }
    met = [obstacle for obstacle, is_met in obstacles.items() if is_met]
    return RowBuckets((MAX_ROWS,), met[0]) if met else RowBuckets((MAX_ROWS, wanted or MAX_BUCKET_ROWS))


def choose_max_seqs(wanted: int | None, buckets: RowBuckets, backend: str) -> int:
    """The number of sequences that run at once. Each takes a row of an iteration.

    None: on GPUs as many as possible, else MAX_ROWS, because more are slower without tensor cores. UsageError: `wanted`
    is more than the rows of an iteration.
    """
    most = min(MAX_SEQUENCES, buckets.rows[-1])
    if wanted is None:
        return most if backend == "cuda" else min(most, MAX_ROWS)
    if wanted > most:
        where = f"with {buckets.why_slabs}" if buckets.why_slabs else "with this max_num_batched_tokens"
        raise UsageError(
            f"max_num_seqs is {wanted}; {where} an iteration carries {most} tokens, one for each sequence, so give at most {most}"
        )
    return wanted


def _has_jobs(bootstrap: Bootstrap) -> bool:
    from distmk.backends.cuda.gpus import has_job_iterations  # needs packages that only GPU machines have

    return has_job_iterations(bootstrap.local_rank)


def check_schedulers(wanted: int | None, num_workers: int, backend: str) -> None:
    """UsageError if `wanted` schedulers of their own do not fit."""
    if wanted is None:
        return
    if wanted > num_workers:
        raise UsageError(f"{wanted} schedulers are more than {num_workers} workers; ask for at most one a worker")
    if backend != "host":
        require_warps(wanted)
