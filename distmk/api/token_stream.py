"""The tokens of requests on an event loop, from an engine whose thread delivers them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from types import TracebackType
from typing import Protocol, TypeVar

from distmk.api.answer_constraints import is_constrained
from distmk.api.input_processor import InputProcessor, check_max_tokens
from distmk.api.prompts import Prompts
from distmk.engine.request import Deliver, Request
from distmk.engine.sampling_params import SamplingParams
from distmk.engine.stats import EngineStats
from distmk.engine.token_output import Logprob, TokenOutput
from distmk.text.chat.messages import ChatPrompt
from distmk.text.output.output_parser import OutputParsers

T = TypeVar("T")

LONG_CHARS = 2048
"""From this length on, text is encoded in a thread: it takes a millisecond or more, in which the event loop would stand still."""
_REQUEST_CHARS = 32  # making a request takes as long as encoding so many characters


class EngineClient(Protocol):
    """An engine, such as `LLM`. All methods may be called from any thread, and none waits for a token."""

    @property
    def inputs(self) -> InputProcessor: ...

    @property
    def max_num_seqs(self) -> int: ...

    @property
    def model(self) -> str: ...

    def add_request(self, request: Request, deliver: Deliver) -> None:
        """Serve a request. `deliver` gets every token, the last with a finish reason, or a DistmkError once the engine has ended.

        DistmkError: the engine has ended.
        """
        ...

    def cancel(self, *requests: Request) -> None:
        """End requests; each may deliver a last token with finish reason abort. Requests that are over stay as they are."""
        ...

    def stats(self) -> EngineStats:
        """DistmkError: the engine has ended (a rank was lost, a hang), also while nothing was asked of it."""
        ...


class TokenStream:
    """Lists of tokens, each with all tokens since the last list. It is an async context; its end cancels unfinished requests."""

    def __init__(
        self,
        llm: EngineClient,
        mailbox: Mailbox,
        prompts: Prompts,
        params: SamplingParams,
        must_fit: bool,
        parsers: OutputParsers | None = None,
    ) -> None:
        self._llm, self._mailbox = llm, mailbox
        self._prompts, self._params, self._must_fit, self._parsers = prompts, params, must_fit, parsers
        self._inbox = _Inbox()
        self._requests: list[Request] = []  # by index
        self._running: set[int] = set()

    async def __aenter__(self) -> TokenStream:
        num_prompts = len(self._prompts) if isinstance(self._prompts, list) else 1
        size = text_size(self._prompts) + _REQUEST_CHARS * self._params.n * num_prompts
        size += LONG_CHARS if is_constrained(self._params) else 0  # a grammar is to be compiled
        self._requests = await in_thread_if_long(self._make_requests, size)
        try:
            for request in self._requests:
                await asyncio.sleep(0)  # others go on between the completions of a large request
                self._llm.add_request(request, functools.partial(self._mailbox.deliver, self._inbox))
                self._running.add(request.index)
        except BaseException:
            self._cancel()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cancel()

    async def __aiter__(self) -> AsyncIterator[list[TokenOutput]]:
        while self._running:
            outputs = []
            for output in await self._inbox.take():
                if isinstance(output, BaseException):
                    self._running.clear()  # ended with the engine
                    raise output.with_traceback(None)
                if output.finish_reason is not None:
                    self._running.discard(output.index)
                outputs.append(output)
            yield outputs

    @property
    def requests(self) -> Sequence[Request]:
        """The request of each completion, by index, once the stream is entered. The engine's thread changes them."""
        return self._requests

    @property
    def prompts(self) -> list[list[int]]:
        """The token ids of each prompt, once the stream is entered."""
        return [request.prompt_ids for request in self._requests if not request.number]

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of all prompts whose keys and values were cached, as far as it is known: with a prompt's first token."""
        return sum(request.num_cached_tokens or 0 for request in self._requests if not request.number)

    def prompt_logprobs(self, index: int) -> Sequence[Mapping[int, Logprob] | None] | None:
        """Log probabilities of the prompt of completion `index` by position, None for the first; known with its first token."""
        return self._requests[index].prompt_logprobs

    def abort(self) -> None:
        """End the requests that run; the last token of each then has the finish reason abort."""
        self._llm.cancel(*(self._requests[index] for index in self._running))

    def _make_requests(self) -> list[Request]:
        requests = self._llm.inputs.make_requests(self._prompts, self._params, parsers=self._parsers)
        for request in requests if self._must_fit else ():
            check_max_tokens(request, self._llm.inputs.max_model_len)
        return requests

    def _cancel(self) -> None:
        if self._running:
            self._llm.cancel(*(self._requests[index] for index in self._running))
            self._running.clear()


async def in_thread_if_long(work: Callable[[], T], num_chars: int) -> T:
    """Do work on text of `num_chars` characters, in a thread if it is long."""
    return await asyncio.to_thread(work) if num_chars >= LONG_CHARS else work()


def text_size(prompts: object) -> int:
    """About how many characters and token ids a prompt or a list of prompts has. A prompt that is not easily counted is long."""
    if isinstance(prompts, list):
        return len(prompts) + sum(map(_size, prompts[:LONG_CHARS]))
    return _size(prompts)


def _size(prompt: object) -> int:
    if isinstance(prompt, str | list):
        return len(prompt)
    if isinstance(prompt, ChatPrompt) and isinstance(prompt.messages, list):
        return sum(map(_message_size, prompt.messages)) + (LONG_CHARS if prompt.tools else 0)
    return 0 if isinstance(prompt, int) else LONG_CHARS


def _message_size(message: object) -> int:
    """Characters of a message and of the template around it, nearly."""
    content = message.get("content") if isinstance(message, Mapping) else ()
    return 32 + (len(content) if isinstance(content, str) else LONG_CHARS if content else 0)


class _Inbox:
    """Outputs for one stream, on the event loop's thread."""

    def __init__(self) -> None:
        self._items: list[TokenOutput | BaseException] = []
        self._came = asyncio.Event()

    def put(self, output: TokenOutput | BaseException) -> None:
        self._items.append(output)
        self._came.set()

    async def take(self) -> list[TokenOutput | BaseException]:
        """All outputs since the last call, at least one."""
        await self._came.wait()
        self._came.clear()
        items, self._items = self._items, []
        return items


class Mailbox:
    """Moves outputs from the engine's thread to the event loop: one wake-up for all that came since the last one."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._items: deque[tuple[_Inbox, TokenOutput | BaseException]] = deque()
        self._woken = False

    def deliver(self, inbox: _Inbox, output: TokenOutput | BaseException) -> None:
        """On the engine's thread."""
        self._items.append((inbox, output))
        if not self._woken:
            self._woken = True
            with contextlib.suppress(RuntimeError):  # the loop has ended, and nobody reads
                self.loop.call_soon_threadsafe(self._distribute)

    def _distribute(self) -> None:
        self._woken = False  # before the items are taken: one that comes later wakes the loop again
        while self._items:
            inbox, output = self._items.popleft()
            inbox.put(output)
