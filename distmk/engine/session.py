"""Run a program on this rank and its peers: ranks start together, watch for lost ranks, and leave together.

`Session` is the low-level public API, for any task graph and any number of ranks.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from distmk import env
from distmk.backends.base import Backend, require_warps
from distmk.backends.defaults import agree_on_backend
from distmk.backends.host.backend import EmulatedBackend, HostBackend
from distmk.backends.launch_spec import LaunchSpec
from distmk.backends.own_sources import type_digests
from distmk.backends.weight_upload import NUMPY_TYPES, upload_constants
from distmk.bootstrap import Bootstrap, agree, agree_same
from distmk.check import check_with_progress
from distmk.engine.running_launch import LaunchContext, RunningLaunch
from distmk.errors import OwnUsageError, UsageError, one_line, shown
from distmk.graph.graph import Graph
from distmk.graph.regions import Buffer
from distmk.interrupts import deferred
from distmk.model.bf16 import f32_to_bf16
from distmk.parameter_checks import deadline, whole
from distmk.program.layout import Placed
from distmk.program.program import Program, RankProgram, compile_graph
from distmk.trace import Trace, capacity_for

if TYPE_CHECKING:
    import torch

_MAX_ITERATIONS = 2**32 - 1


def make_backend(
    name: str,
    program: RankProgram,
    bootstrap: Bootstrap,
    scheduler_threads: bool,
    others: Sequence[RankProgram] = (),
) -> Backend:
    """The backend `name` (host, emulated or cuda) for this rank's program and the programs that take turns with it;
    collective.

    UsageError or BuildError (on every rank): it cannot be made.
    """
    if scheduler_threads and others:
        raise UsageError(
            "programs that take turns have no schedulers of their own; compile one program, or let them ride"
        )
    if scheduler_threads and name != "host":
        require_warps(program.header.num_schedulers)
    if name == "cuda":
        from distmk.backends.cuda.backend import CudaBackend  # needs packages that only GPU machines have

        return CudaBackend(program, bootstrap, scheduler_threads, others)
    made = EmulatedBackend if name == "emulated" else HostBackend
    return made(program, bootstrap, scheduler_threads, others)


class Session:
    """A proved program with its memory on this rank. Collective: every rank makes it from the same graph.

    `backend`: cuda, host, emulated, or auto (or None), which is cuda if that can run here, else host; `backend_name` says
    which. `choose_target` says beforehand, with what a graph depends on: workers, and how matrices are packed. `proved`: the
    program has passed `check` already, as every program of `program_cache` has. `scheduler_threads`: schedulers have threads
    of their own, on a GPU an SM of their own; else they run in the workers' idle time. CheckError: the program cannot be
    proved correct. UsageError: the ranks have different programs or backends, the backend cannot run here, or the wrong
    number of ranks was started.
    """

    def __init__(
        self,
        graph: Graph | Program,
        bootstrap: Bootstrap,
        *,
        deadline_s: float | None = None,
        backend: str | None = "auto",
        proved: bool = False,
        scheduler_threads: bool = False,
    ) -> None:
        if not isinstance(graph, Graph | Program) or not isinstance(bootstrap, Bootstrap):
            raise UsageError(
                f"Session({shown(graph)}, {shown(bootstrap)}); expected a graph, and what distmk.connect() makes"
            )
        self.program = compile_graph(graph) if isinstance(graph, Graph) else graph
        if self.program.num_ranks != bootstrap.world_size:
            raise UsageError(
                f"the graph is for {self.program.num_ranks} ranks, but {bootstrap.world_size} were started; "
                "start as many ranks as the graph has"
            )
        self.backend_name = agree_on_backend(bootstrap, backend)
        if not proved:
            check_with_progress(self.program)
        self.bootstrap = bootstrap
        self.deadline_s = env.deadline_s() if deadline_s is None else deadline(deadline_s)
        self.rank_program = self.program.ranks[bootstrap.rank]
        types = type_digests(self.rank_program.own_types)
        own_types = {f"task type {name}": digest for name, digest in types.items()}
        agree_same(bootstrap, "program", own_types | {"program": self.program.fingerprint()})
        self._running: RunningLaunch | None = None
        self._num_launches = 0
        self._last: RunningLaunch | None = None  # over or not
        self.backend = make_backend(
            self.backend_name,
            self.rank_program,
            bootstrap,
            scheduler_threads,
            [other.ranks[bootstrap.rank] for other in self.program.others],
        )
        self._closed = False
        self._context = LaunchContext(self.program, self.backend, bootstrap, self.deadline_s, os.getpid())
        upload_constants(self.program, self.backend, bootstrap.rank)

    def tensor(self, buffer: Buffer | str) -> torch.Tensor:
        """This rank's buffer as a torch tensor [rows, cols] of its dtype that shares its memory: a GPU's, or the host's.

        A launch sees values that were written before it; only Lamport buffers are zeroed when it begins. On a GPU it waits
        for all streams before it starts, and `run` returns when it is over, so no stream has to wait for it. Leave the tensor
        alone while a launch is under way.

        Valid until `close`, which leaves it with its last contents in memory of its own. Tensors made of it, such as slices,
        share that on the host; on a GPU they must not be used any longer. UsageError: no such buffer, torch is not installed,
        or the session is closed.
        """
        declared, allocation = self._find(buffer)
        return self.backend.tensor(allocation, declared.dtype)

    def view(self, buffer: Buffer | str) -> npt.NDArray[Any]:
        """This rank's buffer as a numpy array [rows, cols]; bf16 as uint16 bits. Needs no torch.

        On the host it shares the buffer's memory, as `tensor` does. On a GPU it is a copy, which is read-only, so that nothing
        is written to it in vain: use `write` or `tensor`. UsageError: no such buffer, or the session is closed.
        """
        declared, allocation = self._find(buffer)
        return self.backend.view(allocation, NUMPY_TYPES[declared.dtype])

    def write(self, buffer: Buffer | str, values: npt.ArrayLike) -> None:
        """Fill this rank's buffer with `values`, numbers that numpy can broadcast to [rows, cols]. Works on every backend.

        Floats are rounded to a bf16 buffer; a uint16 array has its bits, as `view` gives them. UsageError: values of another
        shape or kind, no such buffer, or the session is closed.
        """
        declared, allocation = self._find(buffer)
        dtype = np.dtype(NUMPY_TYPES[declared.dtype])
        shape = (allocation.rows, allocation.row_bytes // dtype.itemsize)
        try:
            array = np.asarray(values)
            if declared.dtype == "bf16" and array.dtype != np.uint16:
                array = f32_to_bf16(array.astype(np.float32))
            full = np.broadcast_to(array.astype(dtype), shape)
        except (TypeError, ValueError) as error:
            raise OwnUsageError(
                f"buffer {declared.name} is {declared.dtype} {list(shape)}, and the values are not: {one_line(error)}"
            ) from None
        self.backend.write(allocation, 0, np.ascontiguousarray(full))

    def _find(self, buffer: Buffer | str) -> tuple[Buffer, Placed]:
        """A buffer and its place, in this program or in one that takes turns with it."""
        if not isinstance(buffer, Buffer | str):
            raise OwnUsageError(f"{shown(buffer)} is no buffer; give what graph.buffer returned, or its name")
        name = buffer if isinstance(buffer, str) else buffer.name
        self._check_open(f"read buffer {name} before")
        declarations = (item for program in self.program.every for item in program.placement.buffers.items())
        for declared, allocation in declarations:
            if declared is buffer or declared.name == buffer:
                return declared, allocation
        raise OwnUsageError(
            f"there is no buffer {name} in this program; give a buffer of this session's graph, or its name"
        )

    def _check_open(self, advice: str) -> None:
        if self._closed:
            raise OwnUsageError(f"this session is closed; {advice}")

    def run(self, num_iterations: int = 1) -> int:
        """Run the graph `num_iterations` times in one launch, on all ranks; returns the iterations done.

        UsageError: no launch has so many, ranks give different numbers, or the session is closed. HangError: a wait passed its
        deadline. RankLostError: a rank died. Interrupted: Ctrl-C on any rank.
        """
        num_iterations = self._agree_on_count("num_iterations", num_iterations)
        spec = LaunchSpec(num_iterations=num_iterations, deadline_s=self.deadline_s)
        running = self.launch(spec)
        for _ in running:
            pass
        return running.iterations

    def run_traced(self, num_iterations: int = 1, num_kept: int | None = None) -> Trace | None:
        """As `run`, with a trace of the last `num_kept` iterations (None: of all).

        Returns it on rank 0, None elsewhere; `distmk.trace` writes and summarizes it.
        """
        num_iterations = self._agree_on_count("num_iterations", num_iterations)
        kept = num_iterations if num_kept is None else self._agree_on_count("num_kept", num_kept)
        kept = min(kept, num_iterations)
        spec = LaunchSpec(num_iterations=num_iterations, deadline_s=self.deadline_s, trace_capacity=self.room_for(kept))
        running = self.launch(spec)
        for _ in running:
            pass
        return running.trace(kept)

    def _agree_on_count(self, name: str, value: object) -> int:
        """A number of iterations. UsageError on every rank: `value` is none, or another one elsewhere."""
        self._check_open("run it before, or make another")
        count = agree(self.bootstrap, lambda: whole(name, value, 1, _MAX_ITERATIONS, f"1 to {_MAX_ITERATIONS}"))
        agree_same(self.bootstrap, "numbers of iterations", {name: str(count)})
        return count

    def room_for(self, num_iterations: int) -> int:
        """The `LaunchSpec.trace_capacity` for a trace of the last `num_iterations` iterations."""
        return capacity_for(self.rank_program, num_iterations)

    def launch(self, spec: LaunchSpec) -> RunningLaunch:
        """Start a launch on all ranks; iterate over it for its tokens. Ends the launch that is under way, if any.

        UsageError: the session is closed.
        """
        self._check_open("run it before, or make another")
        with deferred():
            self.stop()
            self.bootstrap.barrier()  # every rank has left the last launch
            self.backend.reset()
            self.bootstrap.barrier()  # no rank signals to memory that is still to be zeroed
            self._num_launches += 1
            is_good = self._last is not None and self._last.ended_in_order
            spec = dataclasses.replace(spec, keeps_cache=spec.keeps_cache and is_good)
            # Kept before it starts, so that it is stopped whatever happens meanwhile.
            self._running = self._last = running = RunningLaunch(self._context, spec, self._num_launches)
            running.start()
        return running

    def stop(self) -> None:
        """End the launch that is under way, if any."""
        if self._running is not None:
            self._running.stop()
            self._running = None

    def abort(self) -> None:
        """Make all ranks leave the launch that is under way, if any, without waiting for that; from any thread."""
        running = self._running
        if running is not None:
            running.abort()

    def close(self) -> None:
        if self._context.is_forked:
            return
        with deferred():
            with self.bootstrap.losing_stopped_ranks():
                self.stop()
            self._closed = True
            self.backend.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
