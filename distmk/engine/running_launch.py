"""A launch that is under way on all ranks: its tokens, its end, and the ranks that it loses."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass

from distmk.abi import Abort
from distmk.backends.base import Backend, Launch
from distmk.backends.launch_block import Token
from distmk.backends.launch_spec import LaunchSpec
from distmk.bootstrap import Bootstrap
from distmk.engine.outcome import Outcome, first_stuck, gather_outcomes
from distmk.errors import DistmkError, HangError, Interrupted, RankLostError, UsageError
from distmk.interrupts import deferred
from distmk.nvtx_ranges import nvtx_range
from distmk.program.program import Program, RankProgram
from distmk.trace import Trace, collect

POLL_S = 0.05
LOSS_NEWS_S = 2.0  # from the loss of a rank to the news of it over the connections between ranks


@dataclass(frozen=True)
class LaunchContext:
    """What all launches of a session have in common. `owner_pid`: the process that made the session."""

    program: Program
    backend: Backend
    bootstrap: Bootstrap
    deadline_s: float
    owner_pid: int

    @property
    def rank_program(self) -> RankProgram:
        return self.program.ranks[self.bootstrap.rank]

    @property
    def is_forked(self) -> bool:
        """Whether this is a forked child's copy: memory, threads and connections are the parent's."""
        return os.getpid() != self.owner_pid

    def check_owner(self) -> None:
        """UsageError: this is a forked child's copy."""
        if self.is_forked:
            raise UsageError(f"this run belongs to process {self.owner_pid}, from which this one was forked")


class RunningLaunch:
    """An iterator over batches of new tokens until the launch is over; leaving it early ends the launch on all ranks."""

    def __init__(self, context: LaunchContext, spec: LaunchSpec, number: int) -> None:
        self._context, self._spec, self._number = context, spec, number
        self._launch: Launch | None = None
        self._over = self._left_kernel = False
        self._next_check_s = time.monotonic()
        self.iterations = 0
        self.left = False  # the caller of some rank left it before the end
        self.ended_in_order = False  # on all ranks

    def start(self) -> None:
        """Start this rank's part."""
        self._launch = self._context.backend.start(self._spec)

    def trace(self, num_iterations: int | None = None) -> Trace | None:
        """Once it is over: the trace of its last `num_iterations` iterations, on rank 0; collective."""
        records = self._launch.trace() if self._launch else []
        return collect(self._context.program, self._context.bootstrap, records, num_iterations)

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
        self._context.check_owner()
        self._left_kernel = self.launch.wait(timeout_s)
        if time.monotonic() >= self._next_check_s:
            with deferred():  # or a frame that is half read would be lost
                self._heed_others()
            self._next_check_s = time.monotonic() + 4 * POLL_S
        return self.launch.block.take_tokens()

    def _heed_others(self) -> None:
        """Leave the launch if a rank is lost, or if one has given it up."""
        backend, bootstrap = self._context.backend, self._context.bootstrap
        if backend.lost_ranks() or bootstrap.lost_ranks():
            backend.abort(Abort.RANK_LOST)
        elif reason := bootstrap.abort_reason(self._number):
            backend.abort(Abort(reason))

    def end(self, at_end: Callable[[], None] = lambda: None) -> None:
        """Once it is over: exchange with the other ranks how it went. Collective; raises as `tokens` does."""
        self._context.check_owner()
        if self._over or self._launch is None:
            raise Interrupted("this stream was ended by another call, before its last token")
        reason = self._launch.join()
        self._over = True
        self.iterations = self._launch.iterations_done
        if reason:
            self._context.bootstrap.send_abort(self._number, int(reason))
        self._finish(reason)
        self.ended_in_order = not self.left
        at_end()

    def stop(self, left: bool = True) -> None:
        """End the launch on all ranks, if it is not over; `left`: on purpose, which is no error on other ranks."""
        with deferred():
            if self._over or self._context.is_forked:
                return
            self._over = True
            self.abort()
            if self._launch is not None:
                self._launch.join()
            self._context.backend.join_all()
            # Other ranks may report another outcome: they may have ended before the abort reached them.
            with contextlib.suppress(DistmkError):
                self._finish(Abort.INTERRUPTED, left)

    def abort(self) -> None:
        """Make all ranks leave the launch, without waiting for that; from any thread."""
        self._context.backend.abort(Abort.INTERRUPTED)
        self._context.bootstrap.send_abort(self._number, int(Abort.INTERRUPTED))

    def _finish(self, reason: Abort, left: bool = False) -> None:
        """Exchange the outcomes of all ranks; raises the error of the launch, the same on every rank."""
        context = self._context
        if reason is Abort.RANK_LOST:
            raise RankLostError(_name_lost(context))
        block = self._launch.block if self._launch and reason is Abort.HANG else None
        stuck = tuple(block.stuck_waits()) if block else ()
        outcomes = gather_outcomes(context.bootstrap, Outcome(reason, stuck, self.iterations, left))
        self.left = any(outcome.left for outcome in outcomes)
        if self.left:
            return
        if any(outcome.reason is Abort.INTERRUPTED for outcome in outcomes):
            raise Interrupted("the run was stopped")
        if any(outcome.reason is Abort.HANG for outcome in outcomes):
            raise HangError(first_stuck(outcomes), context.deadline_s)


def _name_lost(context: LaunchContext) -> str:
    """Which ranks are lost, and why as far as the connections between ranks tell it."""
    backend, bootstrap = context.backend, context.bootstrap
    until = time.monotonic() + LOSS_NEWS_S
    while bootstrap.loss is None and time.monotonic() < until:
        bootstrap.lost_ranks()
        time.sleep(POLL_S)
    lost = backend.lost_ranks()
    return (
        bootstrap.loss
        or f"rank {', '.join(map(str, lost)) or '(unknown)'} was lost during the run; its process is gone"
    )
