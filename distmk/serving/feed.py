"""The requests of one launch: entries of its request table, and the queue of those that wait for one."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator

from distmk.abi import CommandKind, FinishReason
from distmk.backends.base import Launch, Token
from distmk.serving.requests import Request
from distmk.serving.sampling import TokenOutput
from distmk.serving.stats import WorkCounter

Deliver = Callable[[TokenOutput | BaseException], None]


class Feed:
    """Sends requests to a launch, and its tokens to those who asked for them. Calls must not overlap."""

    def __init__(self, launch: Launch, max_model_len: int, work: WorkCounter) -> None:
        self._launch, self._block = launch, launch.block
        self._work = work
        self._max_model_len = max_model_len
        self._free = list(range(len(self._block.requests)))
        self._waiting: deque[tuple[Request, Deliver]] = deque()
        self._entries: dict[int, int] = {}  # by number, of requests that were sent
        self._sent: dict[int, tuple[Request, Deliver]] = {}  # by number
        self._to_cancel: deque[int] = deque()  # numbers, for which the ring had no room
        self._next_number = 0
        self.finishing = False
        self.idle_since_s = time.monotonic()  # if it is empty

    def add(self, request: Request, deliver: Deliver) -> None:
        """Queue a request. `deliver` gets its tokens, the last with a finish reason."""
        self._waiting.append((request, deliver))
        self._send()

    def cancel(self, request: Request) -> None:
        """End a request early, if it is not over."""
        for index, (waiting, deliver) in enumerate(self._waiting):
            if waiting is request:
                del self._waiting[index]
                deliver(request.abort())
                return
        for number, (sent, _) in self._sent.items():
            if sent is request:
                self._to_cancel.append(number)
        self._send()

    def take(self, tokens: list[Token]) -> None:
        """Hand out tokens that the launch has published."""
        for token in tokens:
            request, deliver = self._sent[token.request]
            if token.finish != FinishReason.NONE:
                del self._sent[token.request]
                self._free.append(self._entries.pop(token.request))
            if request.finish_reason is not None:
                continue  # a stop string ended it, which the launch learns by a command
            output = request.abort() if token.finish == FinishReason.ABORT else request.append(token)
            if output.finish_reason is not None and token.finish == FinishReason.NONE:
                self._to_cancel.append(token.request)
            deliver(output)
        if tokens:
            self.idle_since_s = time.monotonic()
            self._work.step(self._block.counts.iterations, len(tokens), self.is_empty)
        self._send()

    def finish(self) -> None:
        """Let the launch end once all requests are served. Nothing may be added after this."""
        self.finishing = True
        self._block.send(CommandKind.FINISH)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_sent(self) -> int:
        """Requests that the launch has been given, and that are not over."""
        return len(self._sent)

    @property
    def num_running(self) -> int:
        """Sequences of the batch at the last step."""
        return min(int(self._block.counts.num_running), self.num_sent)

    @property
    def num_free_pages(self) -> int | None:
        """Pages that were free at the last step; None: all are."""
        return int(self._block.counts.num_free_pages) if self._sent and self._block.counts.iterations else None

    @property
    def is_empty(self) -> bool:
        """Whether all requests are over."""
        return not self._sent and not self._waiting

    def fail(self, error: BaseException) -> None:
        """The launch has failed: tell everybody whose request is not over."""
        for _, deliver in self._unfinished():
            deliver(error)
        self._waiting.clear()
        self._sent.clear()

    def _unfinished(self) -> Iterator[tuple[Request, Deliver]]:
        for request, deliver in [*self._sent.values(), *self._waiting]:
            if request.finish_reason is None:  # else a stop string ended it, and it was told
                yield request, deliver

    def _send(self) -> None:
        """Send what the launch has room for. An element of the ring stays free for `finish`."""
        block = self._block
        while self._to_cancel and block.has_room(2):
            number = self._to_cancel.popleft()
            if number in self._sent:
                block.send(CommandKind.CANCEL, number=number)
        while self._waiting and self._free and block.has_room(2):
            request, deliver = self._waiting.popleft()
            number, entry = self._next_number, self._free.pop()
            self._next_number = (number + 1) & 0xFFFFFFFF
            self._sent[number], self._entries[number] = (request, deliver), entry
            max_new = min(request.params.max_tokens, self._max_model_len - len(request.prompt_ids))
            self._work.num_prompt_tokens += len(request.prompt_ids)
            block.write_request(entry, number, request.prompt_ids, max_new, request.params.ignore_eos)
            self._launch.upload_request(entry)
            block.send(CommandKind.ADD, entry, number)
