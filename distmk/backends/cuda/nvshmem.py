"""The symmetric heap on GPUs: NVSHMEM, initialized over the ranks' own bootstrap, and the address of every rank's heap."""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import weakref
from typing import Any

import numpy as np

from distmk import env
from distmk.backends.cuda.network import check_hosts_connected, remote_transport
from distmk.backends.cuda.packages import MULTICAST_OFF
from distmk.bootstrap import Bootstrap, agree
from distmk.bootstrap.messages import malformed
from distmk.errors import BuildError

SPARE_BYTES = 64 << 20  # part of the symmetric heap for NVSHMEM's own use
EXIT_S = 10  # seconds that a process may take to end after its heap was abandoned


class SymmetricHeap:
    """This rank's zeroed heap of `num_bytes`. `bases[r]`: the address here of rank r's heap; 0 if no pointer reaches it.

    Construction is collective. `module`: the loaded object code, whose NVSHMEM state is initialized.
    """

    def __init__(self, bootstrap: Bootstrap, device: Any, module: Any, num_bytes: int) -> None:
        import nvshmem.core as nvshmem
        import torch

        name = "NVSHMEM_DISABLE_NVLS"
        os.environ[name] = MULTICAST_OFF[name]
        # Ranks that share a GPU under MPS divide its SMs by having fewer workers, not by a limit of MPS.
        os.environ["NVSHMEM_IGNORE_CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = "1"
        os.environ["NVSHMEM_SYMMETRIC_SIZE"] = str(num_bytes + SPARE_BYTES)
        if bootstrap.local_size >= bootstrap.world_size:  # if larger: other jobs of one rank are on this host
            # NVSHMEM's bootstrap does not authenticate, so on one host it is kept off the network.
            os.environ.setdefault("NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME", "lo")
        agree(bootstrap, lambda: check_hosts_connected(bootstrap.hostnames))
        self._nvshmem, self._module = nvshmem, None
        self._lent: list[weakref.ref[Any]] = []
        uid = nvshmem.get_unique_id(empty=bootstrap.rank != 0)
        payload = bootstrap.broadcast(uid._data.tobytes() if bootstrap.rank == 0 else None)
        if len(payload) != uid._data.nbytes:
            raise malformed("rank 0", "unique id of NVSHMEM")
        uid._data[:] = np.frombuffer(payload, uid._data.dtype).reshape(uid._data.shape)

        def bring_up() -> None:
            nvshmem.init(
                device=device, uid=uid, rank=bootstrap.rank, nranks=bootstrap.world_size, initializer_method="uid"
            )
            # NVSHMEM reports an unreachable rank on standard error, and ends the process at the next call.
            if nvshmem.init_status() < nvshmem.InitStatus.STATUS_IS_INITIALIZED:
                raise BuildError(
                    f"NVSHMEM reaches not all ranks ({remote_transport()} between hosts); its own lines above say "
                    "which, and `distmk doctor` lists the adapters of this host"
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
        except Exception:  # nvshmem4py has no exception type for an unreachable peer
            return 0

    def lend(self, tensor: Any) -> None:
        """Note that a caller gets `tensor`, which uses the heap's memory."""
        self._lent = [ref for ref in self._lent if ref() is not None] + [weakref.ref(tensor)]

    def _replace_lent(self) -> None:
        """Move every tensor that a caller still holds to its own memory, with the present contents.

        If there is no room for it, the tensor loses its elements. Access to freed memory would make the GPU unusable
        for the process.
        """
        import torch

        held = [tensor for ref in self._lent if (tensor := ref()) is not None]
        with torch.no_grad():
            for tensor in held:
                try:
                    tensor.set_(tensor.clone())
                    torch.cuda.synchronize()
                except RuntimeError:  # no room, or the GPU has failed
                    tensor.set_()

    def close(self) -> None:
        """Free the heap and leave NVSHMEM; collective."""
        if self._module is None:
            return
        self._replace_lent()
        self._nvshmem.library_finalize(self._module)
        self._nvshmem.interop.torch.free_tensor(self.tensor)
        self._nvshmem.finalize()
        self._module = None

    def abandon(self) -> None:
        """Leave the heap until the process ends, because `close` would wait for a rank that is gone.

        The tensor must never be collected, because freeing it is collective. NVSHMEM's own exit handlers must not keep
        the process from ending.
        """
        if self._module is None:
            return
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.tensor))
        atexit.register(signal.alarm, EXIT_S)
        self._module = None
