"""What waits for the engine, first come, first served."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import InitVar, dataclass, field
from typing import Any

from distmk.engine.request import Deliver, Request


@dataclass(eq=False)
class SubmittedBatch:
    """Requests that are submitted together. Their tokens go to `deliver`.

    `gather_logits`: the logits of its launch are kept. `alone`: no other batch shares its launch. `ended` is set once the launch
    that such a batch has for itself is over on all ranks. UsageError: another call is serving one of the requests.
    """

    requests: list[Request]
    deliver: InitVar[Deliver]
    gather_logits: bool = False
    alone: bool = False
    ended: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self, deliver: Deliver) -> None:
        for request in self.requests:
            request.begin(deliver)

    @property
    def unfinished(self) -> list[Request]:
        """The requests that are not over."""
        return [request for request in self.requests if not request.is_over]

    def fail(self, error: BaseException) -> None:
        """Tell the receivers that the requests fail."""
        for request in self.requests:
            request.fail(error)
        self.ended.set()


@dataclass(eq=False)
class Task:
    """A function that runs between two launches, with its result or error."""

    fn: Callable[[], Any]
    result: Future[Any] = field(default_factory=Future)

    def run(self) -> None:
        try:
            self.result.set_result(self.fn())
        except BaseException as error:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Raise an error for the caller who waits for the result."""
        self.result.set_exception(error)


class RequestQueue:
    """Batches and tasks in the order in which they came. Its user holds a lock.

    The rule: nothing passes what came before it. What becomes of the first one depends on the engine:

    | the engine has                          | a batch that shares     | a batch that is alone, or a task                   |
    | --------------------------------------- | ----------------------- | -------------------------------------------------- |
    | no launch                               | starts one              | starts one, or runs                                |
    | a launch that starts                    | joins once it has begun | waits                                              |
    | a launch that shares                    | joins at once           | waits; the launch ends once its batches are served |
    | a launch that ends, or of a batch alone | waits                   | waits                                              |

    So a stream of batches starves neither a task nor a batch that is alone: the batches behind that do not join.
    `keeps_cancelled`: a batch that was cancelled has its launch nevertheless, because the other ranks start it, too.
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
        while isinstance(batch := self.first(), SubmittedBatch) and not batch.alone:
            self.take(batch)
            taken.append(batch)
        return taken

    def take_all(self) -> list[SubmittedBatch | Task]:
        """Remove all."""
        taken = list(self._items)
        self._items.clear()
        return taken

    def cancel(self, request: Request) -> None:
        """End a request that waits here."""
        for batch in self._batches():
            if request in batch.unfinished:
                request.abort()
                if not batch.unfinished and not self._keeps_cancelled and batch in self._items:
                    self._items.remove(batch)
                    batch.ended.set()
                return

    def waiting_since_s(self) -> list[float]:
        """When each request that waits here began to wait."""
        return [request.waiting_since_s for batch in self._batches() for request in batch.unfinished]

    def _batches(self) -> list[SubmittedBatch]:
        return [item for item in self._items if isinstance(item, SubmittedBatch)]
