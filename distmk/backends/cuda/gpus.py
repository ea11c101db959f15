"""The GPU of each rank, and the number of SMs that the rank may use if several ranks share a GPU."""

from __future__ import annotations

from collections.abc import Sequence

from distmk import env
from distmk.backends.cuda.driver import DriverError, checked
from distmk.backends.cuda.nvshmem import SPARE_BYTES
from distmk.bootstrap import Bootstrap, agree
from distmk.bootstrap.base import name_ranks
from distmk.bootstrap.messages import gather_json
from distmk.errors import UsageError

OTHER_BYTES = 1 << 30  # GPU memory for contexts, the program, tokens


def gpu_of(local_rank: int) -> int:
    """The GPU of a local rank. UsageError: there is no GPU for it."""
    import torch

    count, most = torch.cuda.device_count(), env.ranks_per_gpu()
    if local_rank >= count * most:
        each = f"with {most} ranks on each" if most > 1 else "start one rank a GPU"
        raise UsageError(
            f"local rank {local_rank} has no GPU: {count} are visible here; {each}, or try more ranks on one by "
            f"DISTMK_RANKS_PER_GPU={local_rank // count + 1 if count else 2}"
        )
    return local_rank % count


def has_job_iterations(local_rank: int) -> bool:
    """Whether a local rank's GPU has the bulk copies that job iterations need: from compute capability 9.0 on."""
    import torch

    return bool(torch.cuda.get_device_capability(gpu_of(local_rank)) >= (9, 0))


def num_sms_of(local_rank: int) -> int:
    """The number of SMs that a local rank may occupy during a launch. UsageError: it has no GPU.

    Ranks that share a GPU run side by side under MPS, and must all fit. Without MPS they run in time slices of
    milliseconds, each with all SMs.
    """
    import torch

    gpu = gpu_of(local_rank)
    num_sms = int(torch.cuda.get_device_properties(gpu).multi_processor_count)
    return max(1, num_sms // env.ranks_per_gpu()) if runs_mps(gpu) else num_sms


def num_sharing(local_size: int) -> int:
    """How many of a host's `local_size` ranks share a GPU."""
    import torch

    return -(-local_size // max(1, torch.cuda.device_count()))


def check_residence(bootstrap: Bootstrap) -> None:
    """UsageError on every rank if an idle launch must not stay on the GPUs. Collective."""

    def mine() -> list[str | bool]:
        gpu = gpu_of(bootstrap.local_rank)
        return [uuid_of(gpu), runs_mps(gpu)]

    rows = gather_json(bootstrap, agree(bootstrap, mine), "GPU", [(str, bool)])
    check_sharing([uuid for uuid, _ in rows], all(mps for _, mps in rows))


def check_sharing(uuids: Sequence[str], mps: bool) -> None:
    """UsageError if ranks share a GPU in time slices.

    `uuids`: each rank's GPU. `mps`: ranks that share a GPU run side by side.

    A launch that waits for requests would use its time slices like one that computes, and take them from the others.
    """
    shared = [uuid for uuid in uuids if uuids.count(uuid) > 1]
    if shared and not mps:
        ranks = [rank for rank, uuid in enumerate(uuids) if uuid == shared[0]]
        raise UsageError(
            f"{name_ranks(ranks)} share a GPU without MPS, where no launch may stay while it is idle; give --idle exit "
            "(idle_exit_s=0), start MPS by `nvidia-cuda-mps-control -d`, or give every rank a GPU of its own"
        )


def uuid_of(gpu: int) -> str:
    """An identifier of a GPU that is the same under whatever number a process sees it."""
    import torch

    return str(torch.cuda.get_device_properties(gpu).uuid)


def memory_budget(local_rank: int, local_size: int, utilization: float) -> int:
    """Bytes of GPU memory that a local rank may use for weights, buffers and KV cache, before any allocation."""
    import torch

    free, total = torch.cuda.mem_get_info(gpu_of(local_rank))
    return min(free, int(total * utilization)) // num_sharing(local_size) - SPARE_BYTES - OTHER_BYTES


def runs_mps(gpu: int) -> bool:
    """Whether kernels of several processes can run on this GPU at once."""
    from cuda.bindings import driver

    try:
        return bool(
            checked(driver.cuDeviceGetAttribute(driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MPS_ENABLED, gpu))
        )
    except DriverError:
        return False
