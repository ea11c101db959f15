"""The thread of rank 0 that runs launches for callers on any thread, and that alone talks to the other ranks meanwhile."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from distmk.errors import DistmkError, Interrupted, RankLostError
from distmk.interrupts import deferred
from distmk.serving.commands import command
from distmk.serving.counters import Counters, Pace
from distmk.serving.engine import Engine
from distmk.serving.engine_client import Deliver
from distmk.serving.feed import Feed
from distmk.serving.prefix_cache import PrefixCache
from distmk.serving.requests import Request
from distmk.serving.running_launch import POLL_S, RunningLaunch
from distmk.serving.stats import EngineStats

T = TypeVar("T")

_IDLE_POLL_S = 0.2  # between two looks at the other ranks while no request is under way


@dataclass(frozen=True)
class Call:
    """Requests that are submitted together. `gather_logits`: they have a launch of their own, whose logits are kept."""

    requests: list[Request]
    deliver: Deliver
    gather_logits: bool = False


@dataclass
class IdlePolicy:
    """How long a launch stays once all its requests are served, in seconds; None: until the driver stops."""

    exit_after_s: float | None = 0.0


class Driver:
    """Runs launches on a thread of its own. `leads`: the other ranks wait for commands; else each call is a launch, which
    they start themselves.

    What it delivers, it delivers on its thread. Its methods may be called on any thread.
    """

    def __init__(self, engine: Engine, leads: bool, idle: IdlePolicy) -> None:
        self._engine, self._leads, self._idle = engine, leads, idle
        self._lock = threading.RLock()  # what is delivered may call back, to cancel
        self._changed = threading.Condition(self._lock)
        self._calls: deque[Call] = deque()
        self._tasks: deque[Callable[[], None]] = deque()
        self._feed: Feed | None = None  # of the launch that is under way
        self._joinable = False  # it takes further calls
        self._stopping = False
        self._error: DistmkError | None = None  # that ended a launch, and with it the ranks' cooperation
        self._counters, self._pace = Counters(), Pace()
        self._cache = PrefixCache(engine.page_size) if engine.caches_prefixes else None
        self._thread = threading.Thread(target=self._run, name="distmk", daemon=True)
        self._thread.start()

    @property
    def is_current(self) -> bool:
        """Whether this is the driver's thread."""
        return threading.current_thread() is self._thread

    def submit(self, call: Call) -> None:
        """Serve a call: in the launch that is under way, if it takes further calls, or in a later one."""
        with deferred(), self._lock:
            if self._stopping:
                raise _closed()
            if self._feed is not None and self._joinable and not self._tasks and not call.gather_logits:
                self._add(self._feed, call)
            else:
                self._calls.append(call)
            self._changed.notify()

    def cancel(self, call: Call) -> None:
        """End what is not over of a call."""
        for request in call.requests:
            self.cancel_request(request)

    def cancel_request(self, request: Request) -> None:
        """End a request early, if it is not over."""
        with deferred(), self._lock:
            if request.finish_reason is not None:
                return
            if self._feed is not None:
                self._feed.cancel(request)
            for call in self._calls:
                if any(one is request for one in call.requests):
                    call.deliver(request.abort())

    def perform(self, fn: Callable[[], T]) -> T:
        """Call `fn` on the driver's thread between two launches, and wait for its result."""
        future: Future[T] = Future()

        def task() -> None:
            try:
                future.set_result(fn())
            except BaseException as error:
                future.set_exception(error)

        with deferred(), self._lock:
            if self._stopping:
                raise _closed()
            self._tasks.append(task)
            self._changed.notify()
        return future.result()

    def stats(self) -> EngineStats:
        """What the engine does now. DistmkError: a launch has failed."""
        with self._lock:
            if self._error is not None:
                raise self._error
            counters, feed, num_pages = self._counters, self._feed, self._engine.num_kv_pages
            counts = feed.counts if feed is not None else None
            num_running = counts.num_running if counts and feed and not feed.is_empty else 0
            num_known = (feed.num_waiting + feed.num_sent if feed else 0) + sum(len(c.requests) for c in self._calls)
            return EngineStats(
                num_running=num_running,
                num_waiting=max(0, num_known - num_running),
                num_kv_pages=num_pages,
                num_free_kv_pages=counts.num_free_pages if counts and counts.iterations else num_pages,
                num_iterations=counters.num_iterations + (counts.iterations if counts else 0),
                iteration_ms=self._pace.iteration_ms,
                num_prompt_tokens=counters.num_prompt_tokens,
                num_generated_tokens=counters.num_generated_tokens,
                num_preemptions=counters.num_preemptions,
                num_prefix_hits=counters.num_prefix_hits,
            )

    def stop(self) -> None:
        """End the launch that is under way, fail the calls that are not over, and end the thread."""
        with deferred(), self._lock:
            self._stopping = True
            self._changed.notify()
        if not self.is_current:
            with self._engine.bootstrap.losing_stopped_ranks():
                self._thread.join()

    def _run(self) -> None:
        while True:
            with self._lock:
                while not (self._stopping or self._tasks or self._calls):
                    self._changed.wait(_IDLE_POLL_S)
                    self._look_at_others()
                if self._stopping:
                    break
                task = self._tasks.popleft() if self._tasks else None
                call = None if task else self._calls.popleft()
            if task is not None:
                task()
            elif call is not None:
                self._serve(call)
        self._refuse()

    def _refuse(self) -> None:
        with self._lock:
            calls, tasks = list(self._calls), list(self._tasks)
        for call in calls:
            for _ in call.requests:
                call.deliver(_closed())
        for task in tasks:
            task()  # raises for its caller that the engine is closed

    def _serve(self, call: Call) -> None:
        """A launch, for a call and those that join it."""
        feed: Feed | None = None
        launch: RunningLaunch | None = None
        try:
            if self._leads:
                self._engine.bootstrap.send_command(command("generate", gather_logits=call.gather_logits))
            launch = self._engine.launch()
            if self._cache is not None and not launch.keeps_cache:
                self._cache.clear()
            feed = Feed(launch.launch, self._engine.max_model_len, self._counters, self._cache)
            with self._lock:
                self._feed, self._joinable = feed, self._leads and not call.gather_logits
                self._add(feed, call)
            while not launch.is_over:
                self._step(launch, feed)
            launch.end(lambda: self._engine.gather(launch, call.gather_logits))
        except BaseException as error:
            self._fail(call, feed, launch, error)
        finally:
            with self._lock:
                self._feed = None
                self._counters.num_iterations += launch.launch.block.counts.iterations if feed and launch else 0

    def _step(self, launch: RunningLaunch, feed: Feed) -> None:
        """Hand out new tokens, or wait for them; end a launch that has been idle for long enough."""
        tokens = launch.poll(0.0 if feed.is_empty else POLL_S)
        with self._lock:
            if self._stopping:
                raise _closed()
            feed.take(tokens)
            if tokens:
                self._pace.note(time.monotonic(), launch.launch.block.counts.iterations)
            if not feed.is_empty or feed.finishing:
                return
            self._pace.rest()
            if self._idles(feed):
                self._changed.wait(_IDLE_POLL_S)
                self._look_at_others()
            else:
                self._joinable = False
                feed.finish()

    def _look_at_others(self) -> None:
        """While nothing is to be done: a rank that is gone, or does not answer, is an error of the engine."""
        if self._leads and self._error is None and (silence := self._engine.bootstrap.silence()):
            self._error = RankLostError(silence)

    def _idles(self, feed: Feed) -> bool:
        """Whether a launch without requests waits for further ones."""
        after_s = self._idle.exit_after_s
        if not self._joinable or self._tasks or self._calls:
            return False
        return after_s is None or time.monotonic() - feed.idle_since_s < after_s

    def _add(self, feed: Feed, call: Call) -> None:
        # Some may have been cancelled before they could be added.
        feed.add(*(request for request in call.requests if request.finish_reason is None), deliver=call.deliver)

    def _fail(self, call: Call, feed: Feed | None, launch: RunningLaunch | None, error: BaseException) -> None:
        with self._engine.bootstrap.losing_stopped_ranks():
            if launch is not None:
                launch.stop()
            else:
                self._engine.session.stop()  # a launch that an exception has kept from being returned
        with self._lock:
            if isinstance(error, DistmkError) and not isinstance(error, Interrupted):
                self._error = error
            if feed is not None:
                feed.fail(error)
            else:
                for _ in call.requests:
                    call.deliver(error)


def _closed() -> Interrupted:
    return Interrupted("this LLM was closed before the call was over; its output is not finished")
