"""Run a program on this rank and its peers: start together, watch over each other, leave together.

`Session` is the low-level public API: any task graph, any number of ranks.
"""

from __future__ import annotations

import contextlib
import pickle
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy.typing as npt

from distmk import env
from distmk.abi import Abort, TokenEvent
from distmk.backends.base import Backend, Launch, LaunchSpec, StuckWait, require_warps
from distmk.backends.host.backend import EmulatedBackend, HostBackend
from distmk.backends.weight_upload import NUMPY_TYPES, upload_constants
from distmk.bootstrap import Bootstrap, agree_same
from distmk.check import check
from distmk.errors import DistmkError, HangError, Interrupted, RankLostError, UsageError, WaitRecord
from distmk.graph.graph import Graph
from distmk.graph.regions import Buffer
from distmk.program.program import Program, RankProgram, compile_graph
from distmk.trace import Trace, capacity_for, collect

POLL_S = 0.05


@dataclass(frozen=True)
class Outcome:
    """How one rank left a launch."""

    reason: Abort
    stuck: tuple[StuckWait, ...]
    iterations: int
    left: bool  # its caller had enough of the launch


def make_backend(name: str, program: RankProgram, bootstrap: Bootstrap, scheduler_threads: bool) -> Backend:
    """The backend `name` (host, emulated or cuda) for this rank's program; collective.

    UsageError or BuildError (on every rank) where it cannot be made.
    """
    if scheduler_threads and name != "host":
        require_warps(program.header.num_schedulers)
    if name == "cuda":
        from distmk.backends.cuda.backend import CudaBackend  # needs packages that only GPU machines have

        return CudaBackend(program, bootstrap, scheduler_threads)
    made = EmulatedBackend if name == "emulated" else HostBackend
    return made(program, bootstrap, scheduler_threads)


class Session:
    """A checked program with its memory on this rank. Collective: every rank makes it from the same graph.

    `proved`: the program passed `check` before (program_cache keeps such). `scheduler_threads`: schedulers have threads,
    on a GPU an SM, of their own; else they ride in the workers' idle time.
    Raises CheckError if the program cannot be proved correct, UsageError if the ranks hold different programs.
    """

    def __init__(
        self,
        graph: Graph | Program,
        bootstrap: Bootstrap,
        *,
        deadline_s: float | None = None,
        backend: str = "host",
        proved: bool = False,
        scheduler_threads: bool = False,
    ) -> None:
        self.program = compile_graph(graph) if isinstance(graph, Graph) else graph
        if self.program.num_ranks != bootstrap.world_size:
            raise UsageError(
                f"the graph is for {self.program.num_ranks} ranks, but {bootstrap.world_size} were started; "
                "start as many ranks as the graph has"
            )
        if not proved:
            check(self.program)
        self.bootstrap = bootstrap
        self.deadline_s = deadline_s or env.deadline_s()
        self.rank_program = self.program.ranks[bootstrap.rank]
        agree_same(bootstrap, "program", {"program": self.program.fingerprint()})
        self._running: RunningLaunch | None = None
        self.backend = make_backend(backend, self.rank_program, bootstrap, scheduler_threads)
        upload_constants(self.program, self.backend, bootstrap.rank)

    def view(self, buffer: Buffer | str) -> npt.NDArray[Any]:
        """This rank's copy of a buffer as [rows, cols]; bf16 shows as uint16. Valid until `close`."""
        for declared, placed in self.program.placement.buffers.items():
            if declared is buffer or declared.name == buffer:
                return self.backend.view(placed, NUMPY_TYPES[declared.dtype])
        raise UsageError(f"there is no buffer {buffer if isinstance(buffer, str) else buffer.name} in this program")

    def run(self, num_iterations: int = 1) -> int:
        """Run the graph that many times in one launch, on all ranks; returns the iterations done.

        HangError: a wait passed its deadline; RankLostError: a rank died; Interrupted: Ctrl-C here or elsewhere.
        """
        spec = LaunchSpec(num_iterations=num_iterations, deadline_s=self.deadline_s)
        running = self.launch(spec)
        for _ in running:
            pass
        return running.iterations

    def run_traced(self, num_iterations: int = 1, num_kept: int | None = None) -> Trace | None:
        """As `run`, keeping a record of every task of the last `num_kept` iterations (None: of all).

        The trace is on rank 0 (None elsewhere); `distmk.trace` writes and sums it up.
        """
        kept = min(num_kept or num_iterations, num_iterations)
        spec = LaunchSpec(num_iterations=num_iterations, deadline_s=self.deadline_s, trace_capacity=self.room_for(kept))
        running = self.launch(spec)
        for _ in running:
            pass
        return running.trace(kept)

    def room_for(self, num_iterations: int) -> int:
        """The `LaunchSpec.trace_capacity` that keeps the last `num_iterations` iterations in full."""
        return capacity_for(self.rank_program, num_iterations)

    def launch(self, spec: LaunchSpec) -> RunningLaunch:
        """Start a launch on all ranks; iterate over it for its tokens. One that is under way ends first."""
        self.stop()
        self.bootstrap.barrier()  # nobody is still leaving the last launch
        self.backend.reset()
        self.bootstrap.barrier()  # nobody signals into what is about to be zeroed
        self._running = RunningLaunch(self, spec)
        return self._running

    def stop(self) -> None:
        """End the launch that is under way, if any."""
        if self._running is not None:
            self._running.stop()
            self._running = None

    def close(self) -> None:
        self.stop()
        self.backend.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class RunningLaunch:
    """Iterates over batches of new tokens until the launch is over; leaving early ends it on all ranks."""

    def __init__(self, session: Session, spec: LaunchSpec) -> None:
        self._session = session
        self._launch: Launch = session.backend.start(spec)
        self._over = False
        self.iterations = 0
        self.left = False  # some rank's caller had enough of it

    def trace(self, num_iterations: int | None = None) -> Trace | None:
        """Once it is over: what all ranks kept of the last `num_iterations` iterations, on rank 0; collective."""
        return collect(self._session.program, self._session.bootstrap, self._launch.trace(), num_iterations)

    def __iter__(self) -> Iterator[list[TokenEvent]]:
        launch, backend = self._launch, self._session.backend
        seen, over = 0, False
        next_look = time.monotonic()
        try:
            while not (over or self._over):
                over = launch.wait(seen, POLL_S)
                count = launch.block.token_count.value
                if count > seen:
                    yield list(launch.block.tokens[seen:count])
                    seen = count
                if time.monotonic() >= next_look:
                    if backend.lost_ranks():
                        backend.abort(Abort.RANK_LOST)
                    next_look = time.monotonic() + 4 * POLL_S
        except BaseException as error:
            self.stop(left=isinstance(error, GeneratorExit))
            raise
        if self._over:
            return
        reason = launch.join()
        self._over = True
        self.iterations = launch.iterations_done
        self._settle(reason)

    def stop(self, left: bool = True) -> None:
        """End the launch on all ranks, if it is not over; `left`: on purpose, so that it is no error elsewhere."""
        if self._over:
            return
        self._over = True
        self._session.backend.abort(Abort.INTERRUPTED)
        self._launch.join()
        # The others tell how they left, and may have been done before they could be told to leave.
        with contextlib.suppress(DistmkError):
            self._settle(Abort.INTERRUPTED, left)

    def _settle(self, reason: Abort, left: bool = False) -> None:
        """All ranks agree on how the launch ended; raises what it ended with."""
        session = self._session
        if reason is Abort.RANK_LOST:
            raise RankLostError(_name_lost(session.backend))
        stuck = tuple(self._launch.block.stuck_waits(session.rank_program)) if reason is Abort.HANG else ()
        mine = pickle.dumps(Outcome(reason, stuck, self.iterations, left))
        outcomes: list[Outcome] = [pickle.loads(payload) for payload in session.bootstrap.allgather(mine)]
        self.left = any(outcome.left for outcome in outcomes)
        if self.left:
            return
        if any(outcome.reason is Abort.INTERRUPTED for outcome in outcomes):
            raise Interrupted("the run was stopped")
        if any(outcome.reason is Abort.HANG for outcome in outcomes):
            raise HangError(first_stuck(outcomes), session.deadline_s)


def first_stuck(outcomes: list[Outcome]) -> WaitRecord:
    """The stuck wait that comes first in program order over all ranks: the others wait for what it holds up."""
    waits = [(wait, rank) for rank, outcome in enumerate(outcomes) for wait in outcome.stuck]
    if not waits:
        return WaitRecord(-1, -1, "none", "start of an iteration", 1, 0)
    wait, rank = min(waits, key=lambda pair: (pair[0].iteration, pair[0].order))
    return WaitRecord(rank, wait.worker, wait.task, wait.event, wait.want, wait.got)


def _name_lost(backend: Backend) -> str:
    until = time.monotonic() + 2
    while not (lost := backend.lost_ranks()) and time.monotonic() < until:
        time.sleep(POLL_S)
    names = ", ".join(map(str, lost)) if lost else "(unknown)"
    return f"rank {names} was lost during the run; its process is gone"
