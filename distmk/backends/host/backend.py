"""The host backend: threads of this process run a rank's program over shared memory."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import secrets
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from distmk import env
from distmk.abi import MAX_PROGRAMS, Abort, Fault, LaunchParams, Space
from distmk.backends.base import check_virtual_nodes, first_batches, inject_dropped_signal
from distmk.backends.host.build import load_emulator, load_runtime
from distmk.backends.host.network import Network
from distmk.backends.host.room import check_room
from distmk.backends.host.shm import SharedHeap
from distmk.backends.launch_block import LaunchBlock, RunnerRecords
from distmk.backends.launch_spec import LaunchSpec
from distmk.backends.own_sources import Platform, require_bodies
from distmk.backends.tensors import require_torch, typed
from distmk.bootstrap import Bootstrap, agree
from distmk.errors import UsageError
from distmk.program.layout import Placed
from distmk.program.program import RankProgram

if TYPE_CHECKING:
    import torch

# Polls before a waiter yields its core. On a core of its own: as many as the usual wait takes (about 0.1 ms). If other
# threads share the core: few.
SPIN_POLLS_OWN_CORE = 1000
SPIN_POLLS_SHARED_CORE = 16

MAP_NORESERVE = 0x4000  # pages count as used only after they are touched (module mmap has this name since Python 3.13)


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


class HostBackend:
    """Implements `base.Backend`. Collective; BuildError or UsageError on every rank if it cannot be constructed."""

    name = "host"
    device = "cpu"
    platform: Platform = "host"  # platform of the bodies
    load_library: Callable[[Sequence[str]], ctypes.CDLL] = staticmethod(load_runtime)

    def __init__(
        self,
        program: RankProgram,
        bootstrap: Bootstrap,
        scheduler_threads: bool = False,
        others: Sequence[RankProgram] = (),
    ) -> None:
        agree(bootstrap, lambda: check_virtual_nodes(self.name))
        self.program, self._others = program, others
        self._launch_iterations = agree(bootstrap, env.launch_iterations)
        agree(bootstrap, lambda: self._check_room(bootstrap.local_size))
        self._library = agree(bootstrap, self._load)
        self._heap = SharedHeap(bootstrap, program.header.heap_bytes, agree(bootstrap, self._node_size))
        self._local = agree(bootstrap, lambda: _arena(program.header.local_bytes))
        self._local_base = ctypes.addressof(ctypes.c_char.from_buffer(self._local))
        self._bases = (ctypes.c_uint64 * bootstrap.world_size)(*self._heap.bases)
        self._bytes = ctypes.create_string_buffer(program.to_bytes(), program.header.program_bytes)
        self._programs = ProgramTable([self._bytes, *(ctypes.create_string_buffer(each.to_bytes()) for each in others)])
        self._network = self._connect(bootstrap)
        threads = program.header.num_workers + (program.header.num_schedulers if scheduler_threads else 0)
        receivers = int(self._network.number != 0)  # the receiver thread must not wait for a worker that spins
        own_cores = bootstrap.local_size * (threads + receivers) <= usable_cores()
        self._spin_polls = SPIN_POLLS_OWN_CORE if own_cores else SPIN_POLLS_SHARED_CORE
        self._scheduler_threads = scheduler_threads
        self._launches: list[HostLaunch] = []  # launches whose threads may run and use this process's memory

    def _load(self) -> ctypes.CDLL:
        require_bodies([self.program, *self._others], self.platform, self.name)
        return self._load_library()

    def _load_library(self) -> ctypes.CDLL:
        return self.load_library(self.program.own_types)

    def _check_room(self, num_ranks: int) -> None:
        header = self.program.header
        check_room({"weights, KV cache and activations": header.local_bytes}, header.heap_bytes, num_ranks)

    def _node_size(self) -> int | None:
        """Ranks of a virtual node, which reach other nodes over the network; None: real hosts."""
        return env.virtual_node_size()

    def _connect(self, bootstrap: Bootstrap) -> Network:
        return Network(self._library, bootstrap, self._heap, self._bytes)

    def _bytes_of(self, placed: Placed) -> npt.NDArray[np.uint8]:
        """uint8 [num_bytes]. As long as the array lives, its memory stays mapped, even after `close`."""
        memory = self._heap.own if placed.space is Space.HEAP else self._local
        return np.frombuffer(memory, np.uint8, placed.num_bytes, placed.offset)

    def view(self, placed: Placed, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        flat: npt.NDArray[Any] = self._bytes_of(placed).view(dtype)
        return flat.reshape(placed.rows, -1)

    def tensor(self, placed: Placed, dtype: str) -> torch.Tensor:
        require_torch()
        import torch

        # Through numpy's array, which keeps the memory mapped; a tensor of torch.frombuffer would not.
        return typed(torch.from_numpy(self._bytes_of(placed)), placed, dtype)

    def write(self, placed: Placed, offset_bytes: int, array: npt.NDArray[Any]) -> None:
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self.view(placed, np.uint8).reshape(-1)[offset_bytes : offset_bytes + len(raw)] = raw

    def reset(self) -> None:
        self._network.drain()
        self._heap.clear(self.program.header.zeroed_heap_bytes)
        for event in first_batches(self._others):
            ctypes.c_uint64.from_address(self._heap.bases[self._heap.rank] + event).value = 1

    def start(self, spec: LaunchSpec) -> HostLaunch:
        block = LaunchBlock.of(spec, self.program, self._others)
        params = LaunchParams()
        block.fill(params)
        params.program = ctypes.addressof(self._bytes)
        params.programs = self._programs.address
        params.heap_bases = ctypes.addressof(self._bases)
        params.local_base = self._local_base
        params.spin_polls = self._spin_polls
        params.scheduler_threads = int(self._scheduler_threads)
        params.network = self._network.number
        params.max_iterations = self._launch_iterations
        inject_dropped_signal(params.fault, self.program.header.rank)
        self._inject_delays(params.fault)
        return HostLaunch(self, block, params)

    def _inject_delays(self, fault: Fault) -> None:
        """Set the delays of a launch and their seed."""
        if delayed := env.delay_puts():
            fault.delay_puts_ns, fault.node_size, fault.seed = delayed[0] * 1000, delayed[1], delayed[2]

    def abort(self, reason: Abort) -> None:
        self._library.distmk_abort(ctypes.addressof(self._bases), len(self._bases), int(reason))
        self._network.abort(reason)

    def abort_reason(self) -> Abort:
        flag = ctypes.c_uint64.from_address(self._heap.bases[self._heap.rank])
        return Abort(flag.value)

    def join_all(self) -> None:
        for launch in list(self._launches):
            launch.join()

    def lost_ranks(self) -> list[int]:
        return sorted({*self._heap.lost_ranks(), *self._network.ends()})

    def close(self) -> None:
        if self._launches:
            self.abort(Abort.INTERRUPTED)
            self.join_all()
        self._network.close()
        self._heap.close()
        with contextlib.suppress(BufferError):  # arrays still refer to it; unmapped once they and this object are gone
            self._local.close()


class EmulatedBackend(HostBackend):
    """The GPU's kernel on the CPU, with a fiber for each of its threads, to test and debug it without a GPU.

    It shows the effects of warps that fall behind, copies that land late and barriers that are never reached. It does
    not show data races and memory reordering, because all fibers share one core and switch only where they wait.
    DISTMK_EMULATOR_SEED repeats the timing of a run.
    """

    name = "emulated"
    platform = "device"

    def __init__(
        self,
        program: RankProgram,
        bootstrap: Bootstrap,
        scheduler_threads: bool = False,
        others: Sequence[RankProgram] = (),
    ) -> None:
        self._seed = agree(bootstrap, env.emulator_seed)
        super().__init__(program, bootstrap, scheduler_threads, others)

    def _load_library(self) -> ctypes.CDLL:
        programs = (self.program, *self._others)
        return load_emulator(self.program.own_types, packed=any(each.has_packed_weights for each in programs))

    def _node_size(self) -> int | None:
        return None  # the emulator has its own network, which writes to every rank's memory

    def _connect(self, bootstrap: Bootstrap) -> Network:
        if far := self._heap.far_ranks:
            agree(bootstrap, lambda: _refuse_far(self._heap.rank, far[0]))
        return super()._connect(bootstrap)

    def read_global(self, name: str, num_bytes: int) -> bytes:
        """The contents of a global variable of the kernel."""
        return (ctypes.c_char * num_bytes).in_dll(self._library, name).raw

    def _inject_delays(self, fault: Fault) -> None:
        fault.seed = secrets.randbits(32) if self._seed is None else self._seed
        fault.node_size = env.virtual_node_size() or 0


class ProgramTable:
    """Programs in this process's memory, and the table of their addresses (LaunchParams.programs)."""

    def __init__(self, programs: list[ctypes.Array[ctypes.c_char]]) -> None:
        self._programs = programs
        self._table = (ctypes.c_uint64 * MAX_PROGRAMS)(*map(ctypes.addressof, programs))
        self.address = ctypes.addressof(self._table)


class HostLaunch:
    """Implements `base.Launch`.

    Until its threads are joined, the backend keeps the launch and the memory that the threads use. So an exception
    between any two steps loses no running thread.
    """

    def __init__(self, backend: HostBackend, block: LaunchBlock, params: LaunchParams) -> None:
        self.block = block
        self._backend, self._params = backend, params
        self._handle = ctypes.c_void_p()  # written by the library before a thread runs
        backend._launches.append(self)
        backend._library.distmk_start(ctypes.addressof(params), ctypes.addressof(self._handle))

    def wait(self, timeout_s: float) -> bool:
        if not self._handle:
            return True
        # Only rank 0 gets tokens.
        counts = None if self._backend.program.header.rank else ctypes.addressof(self.block.counts)
        return bool(self._backend._library.distmk_wait(self._handle, int(timeout_s * 1e6), counts))

    def upload_request(self, entry: int) -> None:
        """Nothing to do: the batcher reads the table itself."""

    def join(self) -> Abort:
        self._backend._library.distmk_join(ctypes.addressof(self._handle))  # clears it
        if self in self._backend._launches:
            self._backend._launches.remove(self)
        return self._backend.abort_reason()

    def trace(self) -> list[RunnerRecords]:
        return self.block.traced()

    @property
    def iterations_done(self) -> int:
        return int(self._params.iterations_done)


def _refuse_far(rank: int, far: int) -> None:
    raise UsageError(
        f"the emulator runs on one machine, but rank {far} shares no memory with rank {rank}; use --backend host"
    )


def _arena(num_bytes: int) -> mmap.mmap:
    """Zeroed private memory; pages are allocated when they are touched. UsageError: the address space has no room for it."""
    try:
        return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    except (OSError, OverflowError) as error:
        raise UsageError(
            f"cannot reserve {num_bytes >> 20} MiB for weights and KV cache ({error}); "
            "lower --max-model-len, or use more ranks"
        ) from None
