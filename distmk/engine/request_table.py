"""The requests of one launch: some have an entry of its request table, and the others wait for one."""

from __future__ import annotations

import time
from collections import deque

from distmk.abi import CommandKind, FinishReason, HostCounts, RowSample
from distmk.backends.base import Launch
from distmk.backends.launch_block import Token
from distmk.engine.counters import Counters
from distmk.engine.mask_writer import MaskWriter
from distmk.engine.prefix_cache import PendingPrefixes, PrefixCache
from distmk.engine.request import Request
from distmk.engine.request_queue import SubmittedBatch
from distmk.engine.sampling_slot import num_unscored, pack_sampling, row_sample_of

NO_TOKEN_LINE = "the constraint allows no token here, or none that logit_bias, min_tokens and the model allow"


class RequestTable:
    """Sends requests to a launch, and its tokens to their receivers. Calls must not overlap.

    A request that the launch puts back for lack of pages is sent again before all that wait. `cache`: of prefixes, as far as
    this launch has their pages; None: every prompt is computed. A request that will find cached most of what another one is
    computing is sent after that; others pass it by. `shares`: the launch takes further batches while it lasts.
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
        self._masks = MaskWriter(self._block.masks)
        self._free = list(range(len(self._block.requests)))  # entries
        self._waiting: deque[Request] = deque()
        self._sent: dict[int, Request] = {}  # by launch_id
        self._to_cancel: deque[int] = deque()  # launch_ids, for which the ring of commands had no room
        self._next_id = 0
        self.finishing = False
        self.idle_since_s = time.monotonic()  # if it is empty

    def add(self, *batches: SubmittedBatch) -> None:
        """Take the unfinished requests of batches, in their order."""
        for batch in batches:
            self._waiting.extend(batch.unfinished)
        self._send()

    def cancel(self, request: Request) -> None:
        """End a request early, if it is here and not over."""
        if request in self._waiting:
            self._waiting.remove(request)
            request.abort()
            return
        if self._sent.get(request.launch_id) is request and not request.is_cancelled:
            request.is_cancelled = True
            self._to_cancel.append(request.launch_id)
        self._send()

    def take(self, tokens: list[Token]) -> None:
        """Hand out tokens that the launch has published."""
        for token in tokens:  # first of all, because the launch is computing rows that need the next masks
            self._masks.advance(self._sent[token.request], token)
        for token in tokens:
            self._take(token)
        if tokens:
            self.idle_since_s = time.monotonic()
        self._send()

    def _take(self, token: Token) -> None:
        request, finish = self._sent[token.request], FinishReason(token.finish)
        self._end_if_failed(request)
        was_over = request.is_over  # a stop string ended it, which the launch learns by a command
        if token.is_score:
            request.score(token)
            return
        output = None
        if token.token >= 0 and not was_over:
            output = request.append(token)
            self._counters.num_generated_tokens += 1
            if not request.has_begun:
                self._begin(request)
            if request.is_over and finish is FinishReason.NONE:
                self._to_cancel.append(request.launch_id)
        if finish is not FinishReason.NONE:
            self._leave(request)
        if finish is FinishReason.PREEMPTED:
            self._counters.num_preemptions += 1
            if not request.is_cancelled and not was_over:  # by a command that found nothing
                request.wait()
                self._waiting.appendleft(request)
                return
        if output is not None:
            request.deliver(output)
        elif finish is FinishReason.ERROR and not was_over:
            request.end_in_error(NO_TOKEN_LINE)
        elif not was_over:
            request.abort()

    def _end_if_failed(self, request: Request) -> None:
        """End a request whose constraint has failed; the launch learns it by a command."""
        if request.is_over or (error := self._masks.take_error(request)) is None:
            return
        request.end_in_error(error)
        self._to_cancel.append(request.launch_id)

    def _begin(self, request: Request) -> None:
        """The first token has come: the prompt has been computed."""
        request.has_begun = True
        if request.num_cached_tokens is None:
            request.num_cached_tokens = self._block.cached_tokens(self._entry(request))
            self._counters.num_prefix_hits += request.num_cached_tokens
            self._counters.num_prompt_tokens += len(request.prompt_ids)
        self._cache_pages(request)

    def _leave(self, request: Request) -> None:
        """The launch has done with a request: its entry is free."""
        del self._sent[request.launch_id]
        self._cache_pages(request)
        self._free.append(self._entry(request))
        request.entry = None

    def _cache_pages(self, request: Request) -> None:
        """A prompt has been computed, or will not be. Keys and values are there of all tokens so far but the last one."""
        if self._prefixes is None:
            return
        if request.has_begun:
            ids, cache = request.all_ids[:-1], self._prefixes.cache
            cache.add(ids, self._block.pages_of(self._entry(request), len(ids) // cache.page_size), request.hashed)
        self._prefixes.remove(request.launch_id, request.hashed)

    def finish(self) -> None:
        """Let the launch end once all requests are served. Nothing may be added after this."""
        self.finishing = True
        self._block.send(CommandKind.FINISH)

    @property
    def is_open(self) -> bool:
        """Whether further batches may join."""
        return self._shares and not self.finishing

    @property
    def counts(self) -> HostCounts:
        """The launch's counts; the batcher writes its part at any time."""
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
        unread = [request.waiting_since_s for request in self._sent.values() if not request.has_begun]
        num_reading = max(0, self.num_running - (len(self._sent) - len(unread)))
        return [*unread[num_reading:], *(request.waiting_since_s for request in self._waiting)]

    @property
    def is_empty(self) -> bool:
        """Whether all requests are over."""
        return not self._sent and not self._waiting

    def fail(self, error: BaseException) -> None:
        """The launch has failed: tell everybody whose request is not over."""
        for request in [*self._sent.values(), *self._waiting]:
            request.fail(error)
        self._waiting.clear()
        self._sent.clear()

    def _send(self) -> None:
        """Send requests while the launch has room. An element of the ring stays free for `finish`."""
        block = self._block
        while self._to_cancel and block.has_room(2):
            launch_id = self._to_cancel.popleft()
            if launch_id in self._sent:
                block.write_command(CommandKind.CANCEL, number=launch_id)
        sent = []
        while self._free and block.has_room(2) and (request := self._next_waiting()) is not None:
            self._waiting.remove(request)
            request.entry, request.launch_id = entry, launch_id = self._free.pop(), self._next_id
            self._next_id = (launch_id + 1) & 0xFFFFFFFF
            self._sent[launch_id] = request
            sent.append(request)
            request.scheduled_s = request.scheduled_s or time.monotonic()
            self._write(request, entry)
            self._launch.upload_request(entry)
            block.write_command(CommandKind.ADD, entry, launch_id)
        block.publish_commands()  # requests of one batch begin together, so that iterations are always the same
        for request in sent:  # while the launch reads their prompts
            self._masks.begin(request)
            self._end_if_failed(request)

    def _next_waiting(self) -> Request | None:
        """The next request to send: one that waits for another to have computed its prompt is passed by."""
        return next((request for request in self._waiting if not self._is_held(request)), None)

    def _is_held(self, request: Request) -> bool:
        """Whether a request had better wait for what another is computing. One that scores its prompt computes all of it."""
        if self._prefixes is None or request.params.prompt_logprobs is not None:
            return False
        if request.prefix_reader is None or not self._prefixes.is_reading(request.prefix_reader):
            request.prefix_reader = self._prefixes.reader_of(request.all_ids, request.hashed)
        return request.prefix_reader is not None

    def _write(self, request: Request, entry: int) -> None:
        """Fill the entry of a request. Tokens that it has generated before it was put back are part of its prompt."""
        ids, num_output = request.all_ids, len(request.token_ids)
        num_scores = num_unscored(request.params, len(request.prompt_ids), request.num_scored)
        prefix = []
        # To score tokens, those before them are computed, few at once.
        if self._prefixes is not None and not num_scores:
            prefix = self._prefixes.add(request.launch_id, ids, request.hashed)
        is_constrained = request.constraint is not None
        draws = is_constrained or row_sample_of(request.params) is RowSample.DRAW
        sampling = None
        if draws or num_scores:
            sampling = pack_sampling(request.params, self._block.spec.eos_ids, request.engine_seed)
        self._block.write_request(
            entry,
            request.launch_id,
            ids,
            min(request.max_tokens - num_output, self._max_model_len - len(ids)),
            request.params.ignore_eos,
            num_output=num_output,
            prefix=prefix,
            sampling=sampling,
            draws=draws,
            num_scores=num_scores,
            is_constrained=is_constrained,
        )

    def _entry(self, request: Request) -> int:
        assert request.entry is not None  # it was sent
        return request.entry
