"""The symmetric heap on GPUs: NVSHMEM brought up over the ranks' own bootstrap, and every rank's heap by address."""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
from typing import Any

import numpy as np

from distmk import env
from distmk.bootstrap import Bootstrap, agree
from distmk.errors import UsageError

SPARE_BYTES = 64 << 20  # of the symmetric heap, for NVSHMEM's own use
EXIT_S = 10  # how long a process may take to end once its heap was abandoned


def require() -> None:
    """UsageError unless the packages of the `cuda` extra are here."""
    for module, package in (("cuda.core", "cuda-python"), ("nvshmem.core", "nvshmem4py-cu13"), ("torch", "torch")):
        try:
            __import__(module)
        except ImportError as error:
            raise UsageError(f"the cuda backend needs {package} ({error}); pip install 'distmk[cuda]'") from None


class SymmetricHeap:
    """This rank's heap of `num_bytes`, zeroed; `bases[r]` is where rank r's is mapped here, 0 where no pointer reaches it.

    Collective. `kernel` is the loaded module whose NVSHMEM state is set up with it.
    """

    def __init__(self, bootstrap: Bootstrap, device: Any, module: Any, num_bytes: int) -> None:
        import nvshmem.core as nvshmem
        import torch

        # NVLink multicast is never needed, and can put a host's GPUs out of service for its other users.
        os.environ["NVSHMEM_DISABLE_NVLS"] = "1"
        # Ranks that share a GPU under MPS hold fewer SMs by having fewer workers, not by a limit that MPS knows.
        os.environ["NVSHMEM_IGNORE_CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = "1"
        os.environ["NVSHMEM_SYMMETRIC_SIZE"] = str(num_bytes + SPARE_BYTES)
        self._nvshmem, self._module = nvshmem, None
        uid = nvshmem.get_unique_id(empty=bootstrap.rank != 0)
        payload = bootstrap.broadcast(uid._data.tobytes() if bootstrap.rank == 0 else None)
        uid._data[:] = np.frombuffer(payload, uid._data.dtype).reshape(uid._data.shape)

        def bring_up() -> None:
            nvshmem.init(
                device=device, uid=uid, rank=bootstrap.rank, nranks=bootstrap.world_size, initializer_method="uid"
            )

        agree(bootstrap, bring_up)
        self._module = nvshmem.NvshmemKernelObject.from_obj(module)
        nvshmem.library_init(self._module)
        self.tensor = nvshmem.interop.torch.tensor((num_bytes,), dtype=torch.uint8)
        self.tensor.zero_()
        torch.cuda.synchronize()
        self.bases = [self._base(rank, bootstrap.rank) for rank in range(bootstrap.world_size)]
        bootstrap.barrier()

    def _base(self, rank: int, own: int) -> int:
        if rank == own:
            return int(self.tensor.data_ptr())
        if (size := env.virtual_node_size()) and rank // size != own // size:
            return 0
        try:
            return int(self._nvshmem.interop.torch.get_peer_tensor(self.tensor, rank).data_ptr())
        except Exception:  # nvshmem4py has no type of its own for "not reachable by load and store"
            return 0

    def close(self) -> None:
        """Give the heap back and leave NVSHMEM; collective."""
        if self._module is None:
            return
        self._nvshmem.library_finalize(self._module)
        self._nvshmem.interop.torch.free_tensor(self.tensor)
        self._nvshmem.finalize()
        self._module = None

    def abandon(self) -> None:
        """Leave the heap to the end of the process: a rank that the orderly way would wait for is gone.

        The heap's owner must not be collected, which would free it together with the others; and what NVSHMEM itself does
        when the process ends must not keep it.
        """
        if self._module is None:
            return
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.tensor))
        atexit.register(signal.alarm, EXIT_S)
        self._module = None
