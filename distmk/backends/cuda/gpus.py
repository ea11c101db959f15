"""Which GPU a rank has, and how much of it: one of its own, or a share where there are more ranks than GPUs."""

from __future__ import annotations

from typing import Any

from distmk import env
from distmk.errors import UsageError


def gpu_of(local_rank: int) -> int:
    """The GPU of a host's rank. UsageError: there is none for it."""
    import torch

    count, most = torch.cuda.device_count(), env.ranks_per_gpu()
    if local_rank >= count * most:
        each = f"with {most} ranks on each" if most > 1 else "start one rank a GPU"
        raise UsageError(
            f"local rank {local_rank} has no GPU: {count} are visible here; {each}, or try more ranks on one by "
            f"DISTMK_RANKS_PER_GPU={local_rank // count + 1 if count else 2}"
        )
    return local_rank % count


def num_sms_of(local_rank: int) -> int:
    """SMs that this rank may hold for as long as a launch takes. UsageError: it has no GPU.

    Ranks that share a GPU run side by side where MPS is running, and must all fit; else they take turns of milliseconds, each
    with all SMs.
    """
    import torch

    gpu = gpu_of(local_rank)
    num_sms = int(torch.cuda.get_device_properties(gpu).multi_processor_count)
    return max(1, num_sms // env.ranks_per_gpu()) if runs_mps(gpu) else num_sms


def num_sharing(local_size: int) -> int:
    """How many of a host's ranks share a GPU."""
    import torch

    return -(-local_size // max(1, torch.cuda.device_count()))


def runs_mps(gpu: int) -> bool:
    """Whether kernels of several processes run on this GPU at once."""
    from cuda.bindings import driver

    kind: Any = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MPS_ENABLED
    error, value = driver.cuDeviceGetAttribute(kind, gpu)
    return error == driver.CUresult.CUDA_SUCCESS and bool(value)
