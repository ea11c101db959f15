"""Run a program on this rank and its peers: ranks start together, watch for lost ranks, and leave together.

`Session` is the low-level public API, for any task graph and any number of ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Generator, Iterator
from types import TracebackType
from typing import Any

import numpy.typing as npt

from distmk import env
from distmk.abi import Abort
from distmk.backends.base import Backend, Launch, LaunchSpec, Token, require_warps
from distmk.backends.host.backend import EmulatedBackend, HostBackend
from distmk.backends.weight_upload import NUMPY_TYPES, upload_constants
from distmk.bootstrap import Bootstrap, agree_same
from distmk.check import check
from distmk.errors import DistmkError, HangError, Interrupted, RankLostError, UsageError
from distmk.graph.graph import Graph
from distmk.graph.regions import Buffer
from distmk.interrupts import deferred
from distmk.nvtx_ranges import nvtx_range
from distmk.program.program import Program, RankProgram, compile_graph
from distmk.serving.outcome import Outcome, first_stuck, gather_outcomes
from distmk.trace import Trace, capacity_for, collect

POLL_S = 0.05
LOSS_NEWS_S = 2.0  # from the loss of a rank to the news of it over the connections between ranks


def make_backend(name: str, program: RankProgram, bootstrap: Bootstrap, scheduler_threads: bool) -> Backend:
    """The backend `name` (host, emulated or cuda) for this rank's program; collective.

    UsageError or BuildError (on every rank): it cannot be made.
    """
    if scheduler_threads and name != "host":
        require_warps(program.header.num_schedulers)
    if name == "cuda":
        from distmk.backends.cuda.backend import CudaBackend  # needs packages that only GPU machines have

        return CudaBackend(program, bootstrap, scheduler_threads)
    made = EmulatedBackend if name == "emulated" else HostBackend
    return made(program, bootstrap, scheduler_threads)


class Session:
    """A proved program with its memory on this rank. Collective: every rank makes it from the same graph.

    `proved`: the program has passed `check` already (as those of `program_cache` have). `scheduler_threads`: schedulers have
    threads of their own, on a GPU an SM of their own; else they run in the workers' idle time. CheckError: the program cannot
    be proved correct. UsageError: the ranks have different programs, or the wrong number of ranks was started.
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
        self._num_launches = 0
        self._cache_is_good = False  # the last launch ended in order on all ranks
        self._owner_pid = os.getpid()
        self.backend = make_backend(backend, self.rank_program, bootstrap, scheduler_threads)
        upload_constants(self.program, self.backend, bootstrap.rank)

    def view(self, buffer: Buffer | str) -> npt.NDArray[Any]:
        """This rank's buffer as an array [rows, cols]; bf16 as uint16 bits. Valid until `close`. UsageError: no such buffer."""
        for declared, allocation in self.program.placement.buffers.items():
            if declared is buffer or declared.name == buffer:
                return self.backend.view(allocation, NUMPY_TYPES[declared.dtype])
        raise UsageError(f"there is no buffer {buffer if isinstance(buffer, str) else buffer.name} in this program")

    def run(self, num_iterations: int = 1) -> int:
        """Run the graph `num_iterations` times in one launch, on all ranks; returns the iterations done.

        HangError: a wait passed its deadline; RankLostError: a rank died; Interrupted: Ctrl-C on any rank.
        """
        spec = LaunchSpec(num_iterations=num_iterations, deadline_s=self.deadline_s)
        running = self.launch(spec)
        for _ in running:
            pass
        return running.iterations

    def run_traced(self, num_iterations: int = 1, num_kept: int | None = None) -> Trace | None:
        """As `run`, with a trace of the last `num_kept` iterations (None: of all).

        Returns it on rank 0, None elsewhere; `distmk.trace` writes and summarizes it.
        """
        kept = min(num_kept or num_iterations, num_iterations)
        spec = LaunchSpec(num_iterations=num_iterations, deadline_s=self.deadline_s, trace_capacity=self.room_for(kept))
        running = self.launch(spec)
        for _ in running:
            pass
        return running.trace(kept)

    def room_for(self, num_iterations: int) -> int:
        """The `LaunchSpec.trace_capacity` for a trace of the last `num_iterations` iterations."""
        return capacity_for(self.rank_program, num_iterations)

    def launch(self, spec: LaunchSpec) -> RunningLaunch:
        """Start a launch on all ranks; iterate over it for its tokens. Ends the launch that is under way, if any."""
        with deferred():
            self.stop()
            self.bootstrap.barrier()  # every rank has left the last launch
            self.backend.reset()
            self.bootstrap.barrier()  # no rank signals to memory that is still to be zeroed
            self._num_launches += 1
            spec = dataclasses.replace(spec, keeps_cache=spec.keeps_cache and self._cache_is_good)
            self._cache_is_good = False
            # Kept before it starts, so that it is stopped whatever happens meanwhile.
            self._running = running = RunningLaunch(self, spec, self._num_launches)
            running.start()
        return running

    def stop(self) -> None:
        """End the launch that is under way, if any."""
        if self._running is not None:
            self._running.stop()
            self._running = None

    @property
    def is_forked(self) -> bool:
        """Whether this is a forked child's copy: memory, threads and connections are the parent's."""
        return os.getpid() != self._owner_pid

    def check_owner(self) -> None:
        """UsageError: this is a forked child's copy."""
        if self.is_forked:
            raise UsageError(f"this run belongs to process {self._owner_pid}, from which this one was forked")

    def abort(self) -> None:
        """Make all ranks leave the launch that is under way, if any, without waiting for that; from any thread."""
        running = self._running
        if running is not None:
            running.abort()

    def close(self) -> None:
        if self.is_forked:
            return
        with deferred():
            with self.bootstrap.losing_stopped_ranks():
                self.stop()
            self.backend.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class RunningLaunch:
    """An iterator over batches of new tokens until the launch is over; leaving it early ends the launch on all ranks."""

    def __init__(self, session: Session, spec: LaunchSpec, number: int) -> None:
        self._session, self._spec, self._number = session, spec, number
        self._launch: Launch | None = None
        self._over = self._left_kernel = False
        self._next_check_s = time.monotonic()
        self.iterations = 0
        self.left = False  # the caller of some rank left it before the end

    def start(self) -> None:
        """Start this rank's part."""
        self._launch = self._session.backend.start(self._spec)

    def trace(self, num_iterations: int | None = None) -> Trace | None:
        """Once it is over: the trace of its last `num_iterations` iterations, on rank 0; collective."""
        records = self._launch.trace() if self._launch else []
        return collect(self._session.program, self._session.bootstrap, records, num_iterations)

    def __iter__(self) -> Iterator[list[Token]]:
        return self.tokens()

    @property
    def launch(self) -> Launch:
        """This rank's part."""
        if self._launch is None:
            raise Interrupted("the run was stopped before it started")
        return self._launch

    @property
    def keeps_cache(self) -> bool:
        """Whether pages of the KV cache that the launch before has filled are still good in this one."""
        return self._spec.keeps_cache

    @property
    def is_over(self) -> bool:
        """Whether this rank has left the launch, or has ended it; `end` says how it went."""
        return self._over or self._left_kernel

    def tokens(self, at_end: Callable[[], None] = lambda: None) -> Generator[list[Token], None, None]:
        """Batches of new tokens; collective. `at_end`, which may be collective, runs on each rank that ends the launch in order.

        Interrupted: the launch was ended by a call of `stop`, or by Ctrl-C on any rank; HangError, RankLostError: see `Session`.
        """
        try:
            with nvtx_range("launch"):
                while not self.is_over:
                    if tokens := self.poll(POLL_S):
                        yield tokens
            with deferred():
                self.end(at_end)
        except BaseException as error:
            self.stop(left=isinstance(error, GeneratorExit))
            raise

    def poll(self, timeout_s: float) -> list[Token]:
        """New tokens; waits up to `timeout_s` for some. Leaves the launch if a rank is lost or has given it up."""
        self._session.check_owner()
        self._left_kernel = self.launch.wait(timeout_s)
        if time.monotonic() >= self._next_check_s:
            with deferred():  # or a frame that is half read would be lost
                self._heed_others()
            self._next_check_s = time.monotonic() + 4 * POLL_S
        return self.launch.block.take_tokens()

    def _heed_others(self) -> None:
        """Leave the launch if a rank is lost, or if one has given it up."""
        backend, bootstrap = self._session.backend, self._session.bootstrap
        if backend.lost_ranks() or bootstrap.lost_ranks():
            backend.abort(Abort.RANK_LOST)
        elif reason := bootstrap.told_abort(self._number):
            backend.abort(Abort(reason))

    def end(self, at_end: Callable[[], None] = lambda: None) -> None:
        """Once it is over: exchange with the other ranks how it went. Collective; raises as `tokens` does."""
        self._session.check_owner()
        if self._over or self._launch is None:
            raise Interrupted("this stream was ended by another call, before its last token")
        reason = self._launch.join()
        self._over = True
        self.iterations = self._launch.iterations_done
        if reason:
            self._session.bootstrap.tell_abort(self._number, int(reason))
        self._finish(reason)
        self._session._cache_is_good = not self.left
        at_end()

    def stop(self, left: bool = True) -> None:
        """End the launch on all ranks, if it is not over; `left`: on purpose, which is no error on other ranks."""
        with deferred():
            if self._over or self._session.is_forked:
                return
            self._over = True
            self.abort()
            if self._launch is not None:
                self._launch.join()
            self._session.backend.join_all()
            # Other ranks may report another outcome: they may have ended before the abort reached them.
            with contextlib.suppress(DistmkError):
                self._finish(Abort.INTERRUPTED, left)

    def abort(self) -> None:
        """Make all ranks leave the launch, without waiting for that; from any thread."""
        self._session.backend.abort(Abort.INTERRUPTED)
        self._session.bootstrap.tell_abort(self._number, int(Abort.INTERRUPTED))

    def _finish(self, reason: Abort, left: bool = False) -> None:
        """Exchange the outcomes of all ranks; raises the error of the launch, the same on every rank."""
        session = self._session
        if reason is Abort.RANK_LOST:
            raise RankLostError(_name_lost(session))
        block = self._launch.block if self._launch and reason is Abort.HANG else None
        stuck = tuple(block.stuck_waits(session.rank_program)) if block else ()
        outcomes = gather_outcomes(session.bootstrap, Outcome(reason, stuck, self.iterations, left))
        self.left = any(outcome.left for outcome in outcomes)
        if self.left:
            return
        if any(outcome.reason is Abort.INTERRUPTED for outcome in outcomes):
            raise Interrupted("the run was stopped")
        if any(outcome.reason is Abort.HANG for outcome in outcomes):
            raise HangError(first_stuck(outcomes), session.deadline_s)


def _name_lost(session: Session) -> str:
    """Which ranks are lost, and why as far as the connections between ranks tell it."""
    backend, bootstrap = session.backend, session.bootstrap
    until = time.monotonic() + LOSS_NEWS_S
    while bootstrap.loss is None and time.monotonic() < until:
        bootstrap.lost_ranks()
        time.sleep(POLL_S)
    lost = backend.lost_ranks()
    return (
        bootstrap.loss
        or f"rank {', '.join(map(str, lost)) or '(unknown)'} was lost during the run; its process is gone"
    )
