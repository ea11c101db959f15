"""The requests of one launch: entries of its request table, and the queue of those that wait for one."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from distmk.abi import CommandKind, FinishReason, HostCounts, RowSample
from distmk.backends.base import Launch
from distmk.backends.launch_block import Token
from distmk.engine.counters import Counters
from distmk.engine.engine_client import Deliver
from distmk.engine.pending_prefixes import PendingPrefixes
from distmk.engine.prefix_cache import CachedTokens, PrefixCache
from distmk.engine.request import Request
from distmk.engine.request_queue import SubmittedBatch
from distmk.engine.sampling_slot import num_unscored, pack_sampling, row_sample_of


@dataclass
class _Waiting:
    """A request that waits to be sent, since `since_s`. `reader`: number of another that reads what this one will find cached."""

    request: Request
    deliver: Deliver
    since_s: float
    tokens: CachedTokens = field(default_factory=CachedTokens)
    reader: int | None = None


@dataclass
class _Sent:
    """A request in `entry` of the launch's table. `begun`: it has got a token since it was sent."""

    request: Request
    deliver: Deliver
    since_s: float
    entry: int
    tokens: CachedTokens
    begun: bool = False
    cancelled: bool = False


class RequestTable:
    """Sends requests to a launch, and its tokens to those who asked for them. Calls must not overlap.

    A request that the launch puts back for lack of pages is sent again before all that wait, with its tokens so far. `cache`: of
    prefixes, as far as this launch has their pages; None: every prompt is computed. A request that will find cached most of what
    another one is reading is sent after that; others pass it by. `shares`: the launch takes further calls while it lasts.
    """

    def __init__(
        self,
        launch: Launch,
        max_model_len: int,
        counters: Counters | None = None,
        cache: PrefixCache | None = None,
        shares: bool = True,
    ) -> None:
        self._launch, self._block, self._shares = launch, launch.block, shares
        self._max_model_len = max_model_len
        self._counters = counters or Counters()
        self._prefixes = PendingPrefixes(cache) if cache is not None else None
        self._free = list(range(len(self._block.requests)))
        self._waiting: deque[_Waiting] = deque()
        self._sent: dict[int, _Sent] = {}  # by number
        self._to_cancel: deque[int] = deque()  # numbers, for which the ring had no room
        self._next_number = 0
        self.finishing = False
        self.idle_since_s = time.monotonic()  # if it is empty

    def add(self, *calls: SubmittedBatch) -> None:
        """Queue what is not over of calls, in their order. They get its tokens, the last of each request with a finish reason."""
        for call in calls:
            self._waiting.extend(_Waiting(request, call.deliver, call.arrived_s) for request in call.unfinished)
        self._send()

    def cancel(self, request: Request) -> None:
        """End a request early, if it is not over."""
        for index, waiting in enumerate(self._waiting):
            if waiting.request is request:
                del self._waiting[index]
                waiting.deliver(request.abort())
                return
        for number, sent in self._sent.items():
            if sent.request is request and not sent.cancelled:
                sent.cancelled = True
                self._to_cancel.append(number)
        self._send()

    def take(self, tokens: list[Token]) -> None:
        """Hand out tokens that the launch has published."""
        for token in tokens:
            self._take(token)
        if tokens:
            self.idle_since_s = time.monotonic()
        self._send()

    def _take(self, token: Token) -> None:
        sent = self._sent[token.request]
        request, finish = sent.request, FinishReason(token.finish)
        was_over = request.finish_reason is not None  # a stop string ended it, which the launch learns by a command
        if token.is_score:
            request.score(token)
            return
        output = None
        if token.token >= 0 and not was_over:
            output = request.append(token)
            self._counters.num_generated_tokens += 1
            if not sent.begun:
                self._begin(token.request, sent)
            if output.finish_reason is not None and finish is FinishReason.NONE:
                self._to_cancel.append(token.request)
        if finish is not FinishReason.NONE:
            del self._sent[token.request]
            self._free.append(sent.entry)
            self._has_read(token.request, sent)
        if finish is FinishReason.PREEMPTED:
            self._counters.num_preemptions += 1
            if not sent.cancelled and not was_over:  # by a command that found nothing
                self._waiting.appendleft(_Waiting(request, sent.deliver, time.monotonic()))
                return
        if not was_over:
            sent.deliver(output or request.abort())

    def _begin(self, number: int, sent: _Sent) -> None:
        """The first token has come: the prompt has been read."""
        sent.begun, request = True, sent.request
        if request.num_cached_tokens is None:
            request.num_cached_tokens = self._block.cached_tokens(sent.entry)
            self._counters.num_prefix_hits += request.num_cached_tokens
            self._counters.num_prompt_tokens += len(request.prompt_ids)
        self._has_read(number, sent)

    def _has_read(self, number: int, sent: _Sent) -> None:
        """A prompt has been read, or will not be. Of its tokens and those after it all but the last have keys and values."""
        if self._prefixes is None:
            return
        if sent.begun:
            ids, cache = sent.request.all_ids[:-1], self._prefixes.cache
            cache.add(ids, self._block.pages_of(sent.entry, len(ids) // cache.page_size), sent.tokens)
        self._prefixes.remove(number, sent.tokens)

    def finish(self) -> None:
        """Let the launch end once all requests are served. Nothing may be added after this."""
        self.finishing = True
        self._block.send(CommandKind.FINISH)

    @property
    def is_open(self) -> bool:
        """Whether further calls may join."""
        return self._shares and not self.finishing

    @property
    def counts(self) -> HostCounts:
        """The launch's counts, of which the batcher writes its part at any time."""
        return self._block.counts

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Sequences in the batch."""
        return 0 if self.is_empty else int(self.counts.num_running)

    def waiting_since_s(self) -> list[float]:
        """When each request that is not in the batch began to wait, here or in the launch, which takes them in order."""
        unread = [sent.since_s for sent in self._sent.values() if not sent.begun]
        num_reading = max(0, self.num_running - (len(self._sent) - len(unread)))
        return [*unread[num_reading:], *(waiting.since_s for waiting in self._waiting)]

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
        everybody: list[_Sent | _Waiting] = [*self._sent.values(), *self._waiting]
        for one in everybody:
            if one.request.finish_reason is None:  # else a stop string ended it, and it was told
                yield one.request, one.deliver

    def _send(self) -> None:
        """Send what the launch has room for. An element of the ring stays free for `finish`."""
        block = self._block
        while self._to_cancel and block.has_room(2):
            number = self._to_cancel.popleft()
            if number in self._sent:
                block.write_command(CommandKind.CANCEL, number=number)
        while self._free and block.has_room(2) and (index := self._next_waiting()) is not None:
            waiting = self._waiting[index]
            del self._waiting[index]
            number, entry = self._next_number, self._free.pop()
            self._next_number = (number + 1) & 0xFFFFFFFF
            self._sent[number] = sent = _Sent(waiting.request, waiting.deliver, waiting.since_s, entry, waiting.tokens)
            self._write(number, sent)
            self._launch.upload_request(entry)
            block.write_command(CommandKind.ADD, entry, number)
        block.publish_commands()  # requests of one call begin together, so that their batches are always the same

    def _next_waiting(self) -> int | None:
        """Index of the next request to send: one that waits for another to have read its prompt is passed by."""
        return next((index for index, waiting in enumerate(self._waiting) if not self._is_held(waiting)), None)

    def _is_held(self, waiting: _Waiting) -> bool:
        """Whether a request had better wait for what another is reading. One that scores its prompt computes all of it."""
        request = waiting.request
        if self._prefixes is None or request.params.prompt_logprobs is not None:
            return False
        if waiting.reader is None or not self._prefixes.is_reading(waiting.reader):
            waiting.reader = self._prefixes.reader_of(request.all_ids, waiting.tokens)
        return waiting.reader is not None

    def _write(self, number: int, sent: _Sent) -> None:
        """Fill the entry of a request: what it has generated before it was put back is part of its prompt."""
        request, num_output = sent.request, len(sent.request.token_ids)
        ids = request.all_ids
        max_new = min(request.max_tokens - num_output, self._max_model_len - len(ids))
        num_scores = num_unscored(request.params, len(request.prompt_ids), request.num_scored)
        prefix = []
        # To score tokens, those before them are computed, few at once.
        if self._prefixes is not None and not num_scores:
            prefix = self._prefixes.add(number, ids, sent.tokens)
        draws = row_sample_of(request.params) is RowSample.DRAW
        sampling = None
        if draws or num_scores:
            sampling = pack_sampling(request.params, self._block.spec.eos_ids, request.engine_seed)
        self._block.write_request(
            sent.entry,
            number,
            ids,
            max_new,
            request.params.ignore_eos,
            num_output=num_output,
            prefix=prefix,
            sampling=sampling,
            draws=draws,
            num_scores=num_scores,
        )
