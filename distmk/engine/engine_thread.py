"""The thread of rank 0 that runs launches for callers on any thread, and that alone talks to the other ranks meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from distmk.abi import HostCounts
from distmk.engine.commands import command
from distmk.engine.counters import Counters, Pace
from distmk.engine.engine import Engine
from distmk.engine.prefix_cache import PrefixCache
from distmk.engine.request import Request
from distmk.engine.request_queue import RequestQueue, SubmittedBatch, Task
from distmk.engine.request_table import RequestTable
from distmk.engine.running_launch import POLL_S, RunningLaunch
from distmk.engine.stats import DraftStats, EngineStats
from distmk.errors import DistmkError, Interrupted, RankLostError
from distmk.gc_pause import FrozenHeap
from distmk.interrupts import deferred

T = TypeVar("T")

_IDLE_POLL_S = 0.2  # between two looks at the other ranks while no request is under way


class EngineThread:
    """Runs launches on a thread of its own, for batches of requests in the order of `RequestQueue`.

    `leads`: the other ranks wait for commands; else each batch has a launch for itself, which the other ranks start themselves.
    `idle_exit_s`: how long a launch stays once all its requests are served; None: until the thread stops.

    Receivers are called on this thread. Its methods may be called on any thread.
    """

    def __init__(self, engine: Engine, leads: bool, idle_exit_s: float | None) -> None:
        self._engine, self._leads, self._idle_exit_s = engine, leads, idle_exit_s
        self._lock = threading.RLock()  # what is delivered may call back, to cancel
        self._changed = threading.Condition(self._lock)
        self._queue = RequestQueue(keeps_cancelled=not leads)
        self._table: RequestTable | None = None  # of the launch that is under way
        self._stopping = False
        self._error: DistmkError | None = None  # that ended a launch, and with it the ranks' cooperation
        self._counters, self._pace, self._heap = Counters(), Pace(), FrozenHeap()
        self.prefix_cache = PrefixCache(engine.page_size) if engine.caches_prefixes else None
        self._thread = threading.Thread(target=self._run, name="distmk", daemon=True)
        self._thread.start()

    @property
    def is_current(self) -> bool:
        """Whether the caller is on this thread."""
        return threading.current_thread() is self._thread

    def add(self, batch: SubmittedBatch) -> None:
        """Serve a batch, once it is its turn. Interrupted: the thread has been stopped."""
        self._append(batch)

    def call(self, fn: Callable[[], T]) -> Future[T]:
        """Call `fn` on this thread between two launches, once it is its turn. Interrupted: the thread has been stopped."""
        task = Task(fn)
        self._append(task)
        return task.result

    def _append(self, item: SubmittedBatch | Task) -> None:
        with deferred(), self._lock:
            if self._stopping:
                raise _closed()
            self._queue.append(item)
            self._admit()
            self._changed.notify()

    def cancel(self, *requests: Request) -> None:
        """End requests early, unless they are over."""
        with deferred(), self._lock:
            for request in requests:
                if self._table is not None and not request.is_over:
                    self._table.cancel(request)
                if not request.is_over:
                    self._queue.cancel(request)
            self._admit()  # the batches behind one that was cancelled

    def stats(self) -> EngineStats:
        """The engine's state and counts. DistmkError: a launch has failed."""
        with self._lock:
            if self._error is not None:
                raise self._error
            counters, table, num_pages = self._counters, self._table, self._engine.num_kv_pages
            counts = table.counts if table is not None else None
            since_s = self._queue.waiting_since_s()
            since_s += table.waiting_since_s() if table is not None else []
            return EngineStats(
                num_running=table.num_running if table is not None else 0,
                num_waiting=len(since_s),
                num_kv_pages=num_pages,
                num_free_kv_pages=counts.num_free_pages if counts and counts.iterations else num_pages,
                num_iterations=counters.num_iterations + (counts.iterations if counts else 0),
                iteration_ms=self._pace.iteration_ms,
                num_prompt_tokens=counters.num_prompt_tokens,
                num_generated_tokens=counters.num_generated_tokens,
                num_preemptions=counters.num_preemptions,
                num_prefix_hits=counters.num_prefix_hits,
                drafts=self._drafts(counts),
                oldest_waiting_s=time.monotonic() - min(since_s) if since_s else 0.0,
                num_repeated_rows=counters.num_repeated_rows + (counts.num_repeated_rows if counts else 0),
            )

    def _drafts(self, counts: HostCounts | None) -> DraftStats | None:
        """What became of drafts so far, `counts` of the present launch included."""
        if self._engine.args.drafter is None:
            return None
        return self._counters.drafts + DraftStats.of(counts.drafts) if counts else self._counters.drafts

    def stop(self) -> None:
        """End the launch that is under way, fail the batches that are not over, and end the thread."""
        with deferred(), self._lock:
            self._stopping = True
            self._changed.notify()
        if not self.is_current:
            with self._engine.bootstrap.losing_stopped_ranks():
                self._thread.join()

    def _admit(self) -> None:
        """Let batches whose turn it is join the launch that is under way."""
        if self._table is not None and self._table.is_open and (batches := self._queue.take_sharing()):
            self._table.add(*batches)

    def _run(self) -> None:
        while (item := self._next()) is not None:
            if isinstance(item, SubmittedBatch):
                self._serve(item)
            else:
                item.run()
        self._heap.release()
        self._refuse()

    def _next(self) -> SubmittedBatch | Task | None:
        """Wait for the next batch or task; None: the thread stops. A task is taken, a batch stays until its launch has begun."""
        with self._lock:
            while not self._stopping:
                if (item := self._queue.first()) is not None:
                    if isinstance(item, Task):
                        self._queue.take(item)
                    return item
                self._changed.wait(_IDLE_POLL_S)
                self._heap.idle(time.monotonic())
                self._look_at_others()
        return None

    def _refuse(self) -> None:
        with self._lock:
            items = self._queue.take_all()
        for item in items:
            item.fail(_closed())

    def _serve(self, batch: SubmittedBatch) -> None:
        """Run a launch for a batch and the batches that join it."""
        table: RequestTable | None = None
        launch: RunningLaunch | None = None
        try:
            if self._leads:
                self._engine.bootstrap.send_command(command("generate", gather_logits=batch.gather_logits))
            launch = self._engine.launch()
            table = self._begin(batch, launch)
            while not launch.is_over:
                self._step(launch, table)
            launch.end(lambda: self._engine.gather(launch, batch.gather_logits))
        except BaseException as error:
            self._fail(batch, table, launch, error)
        finally:
            with self._lock:
                self._table = None
                if table and launch:
                    counts = launch.launch.block.counts
                    self._counters.num_iterations += counts.iterations
                    self._counters.drafts += DraftStats.of(counts.drafts)
                    self._counters.num_repeated_rows += counts.num_repeated_rows
            self._rest()
            batch.ended.set()

    def _begin(self, batch: SubmittedBatch, launch: RunningLaunch) -> RequestTable:
        """Give a launch that has begun its first batches."""
        if self.prefix_cache is not None and not launch.keeps_cache:
            self.prefix_cache.clear()
        table = RequestTable(
            launch.launch, self._engine.max_model_len, self._counters, self.prefix_cache, shares=not batch.alone
        )
        with self._lock:
            self._table = table
            if batch.alone:
                self._queue.take(batch)
                table.add(batch)
            self._admit()
        return table

    def _step(self, launch: RunningLaunch, table: RequestTable) -> None:
        """Hand out new tokens, or wait for them; end a launch that has been idle for long enough."""
        tokens = launch.poll(0.0 if table.is_empty else POLL_S)
        with self._lock:
            if self._stopping:
                raise _closed()
            table.take(tokens)
            if tokens:
                self._pace.note(time.monotonic(), launch.launch.block.counts.iterations)
            if not table.is_empty:
                self._heap.busy(time.monotonic())
            if not table.is_empty or table.finishing:
                return
            self._rest()
            if self._idles(table):
                self._changed.wait(_IDLE_POLL_S)
                self._look_at_others()
            else:
                table.finish()

    def _rest(self) -> None:
        """There is no request to serve."""
        self._pace.rest()
        self._heap.idle(time.monotonic())

    def _look_at_others(self) -> None:
        """While nothing is to be done: a rank that is gone, or does not answer, is an error of the engine."""
        if self._leads and self._error is None and (silence := self._engine.bootstrap.silence()):
            self._error = RankLostError(silence)

    def _idles(self, table: RequestTable) -> bool:
        """Whether a launch without requests waits for further ones."""
        after_s = self._idle_exit_s
        if not table.is_open or self._queue.first() is not None:
            return False
        return after_s is None or time.monotonic() - table.idle_since_s < after_s

    def _fail(
        self, batch: SubmittedBatch, table: RequestTable | None, launch: RunningLaunch | None, error: BaseException
    ) -> None:
        """A launch has failed, and with it the requests in it. One that has not begun fails the batch that it was for."""
        with self._engine.bootstrap.losing_stopped_ranks():
            if launch is not None:
                launch.stop()
            else:
                self._engine.session.stop()  # a launch that an exception has kept from being returned
        with self._lock:
            if isinstance(error, DistmkError) and not isinstance(error, Interrupted):
                self._error = error
            self._table = None  # what is submitted from here on waits for another launch
            if table is not None:
                table.fail(error)
            else:
                self._queue.take(batch)
                batch.fail(error)


def _closed() -> Interrupted:
    return Interrupted("this LLM was closed before the call was over; its output is not finished")
