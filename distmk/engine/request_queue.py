"""What waits for the engine, first come, first served."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from distmk.engine.engine_client import Deliver
from distmk.engine.request import Request


@dataclass(eq=False)
class SubmittedBatch:
    """Requests that are submitted together.

    `gather_logits`: the logits of its launch are kept. `alone`: no other call shares its launch. `ended` is set once the launch
    that such a call has for itself is over on all ranks.
    """

    requests: list[Request]
    deliver: Deliver
    gather_logits: bool = False
    alone: bool = False
    arrived_s: float = field(default_factory=time.monotonic)
    ended: threading.Event = field(default_factory=threading.Event)

    @property
    def unfinished(self) -> list[Request]:
        """The requests that are not over."""
        return [request for request in self.requests if request.finish_reason is None]

    def fail(self, error: BaseException) -> None:
        """Tell whoever waits for a request of this call that it fails."""
        for _ in self.unfinished:
            self.deliver(error)
        self.ended.set()


@dataclass(eq=False)
class Task:
    """A function that runs between two launches, and what it returns or raises."""

    fn: Callable[[], Any]
    result: Future[Any] = field(default_factory=Future)

    def run(self) -> None:
        try:
            self.result.set_result(self.fn())
        except BaseException as error:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Let whoever waits for it see an error."""
        self.result.set_exception(error)


class RequestQueue:
    """Calls and tasks in the order in which they came. Its user holds a lock.

    The rule: nothing passes what came before it. What becomes of the first one depends on the engine:

    | the engine has                          | a call that shares      | a call that is alone, or a task                  |
    | --------------------------------------- | ----------------------- | ------------------------------------------------ |
    | no launch                               | starts one              | starts one, or runs                              |
    | a launch that starts                    | joins once it has begun | waits                                            |
    | a launch that shares                    | joins at once           | waits; the launch ends once its calls are served |
    | a launch that ends, or of a call alone  | waits                   | waits                                            |

    So a stream of calls starves neither a task nor a call that is alone: the calls behind that do not join. `keeps_cancelled`: a
    call that was cancelled has its launch nevertheless, because the other ranks make the call, too.
    """

    def __init__(self, keeps_cancelled: bool = False) -> None:
        self._items: deque[SubmittedBatch | Task] = deque()
        self._keeps_cancelled = keeps_cancelled

    def append(self, item: SubmittedBatch | Task) -> None:
        self._items.append(item)

    def first(self) -> SubmittedBatch | Task | None:
        """The one whose turn it is."""
        return self._items[0] if self._items else None

    def take(self, item: SubmittedBatch | Task) -> None:
        """Remove `item`, if it is the first."""
        if self._items and self._items[0] is item:
            self._items.popleft()

    def take_sharing(self) -> list[SubmittedBatch]:
        """Remove the first ones, up to the first that may not share a launch."""
        taken: list[SubmittedBatch] = []
        while isinstance(call := self.first(), SubmittedBatch) and not call.alone:
            self.take(call)
            taken.append(call)
        return taken

    def take_all(self) -> list[SubmittedBatch | Task]:
        """Remove all."""
        taken = list(self._items)
        self._items.clear()
        return taken

    def cancel(self, request: Request) -> None:
        """End a request that waits here."""
        for call in self.calls():
            if any(one is request for one in call.unfinished):
                call.deliver(request.abort())
                if not call.unfinished and not self._keeps_cancelled and call in self._items:
                    self._items.remove(call)
                    call.ended.set()
                return

    def calls(self) -> list[SubmittedBatch]:
        """The calls that wait."""
        return [item for item in self._items if isinstance(item, SubmittedBatch)]
