"""An engine for asyncio: any number of tasks generate at once."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import replace
from types import TracebackType

from distmk.engine.completions import one_by_one
from distmk.engine.engine_client import EngineClient, SubmittedRequest
from distmk.engine.sampling_params import Logprob, SamplingParams, TokenOutput
from distmk.engine.stats import EngineStats
from distmk.errors import UsageError


class AsyncLLM:
    """Generates tokens on an event loop, from an engine whose thread delivers them."""

    def __init__(self, llm: EngineClient) -> None:
        self.llm = llm
        self._mailbox: _Mailbox | None = None

    async def generate(self, prompt: str | Sequence[int], params: SamplingParams) -> AsyncGenerator[TokenOutput, None]:
        """The tokens of a prompt as they come; `index` tells the completions of `params.n` apart.

        Lifecycle the generator, or cancelling its task, cancels the request. UsageError: the request cannot be served.
        DistmkError: the engine has ended.
        """
        async with self.submit([prompt], params) as stream:
            async for outputs in stream:
                for output in outputs:
                    yield output

    def submit(self, prompts: Sequence[str | Sequence[int]], params: SamplingParams) -> TokenStream:
        """The completions of several prompts in one stream: `index` is the prompt's number * n + the completion's number.

        A seeded completion has the seed plus its number within the prompt, as in vLLM. Errors come when the stream is entered.
        """
        loop = asyncio.get_running_loop()
        if self._mailbox is None or self._mailbox.loop is not loop:
            self._mailbox = _Mailbox(loop)
        return TokenStream(self.llm, self._mailbox, prompts, params)

    def encode(self, prompt: str | Sequence[int]) -> list[int]:
        """The token ids of a prompt. UsageError: text cannot be encoded, or the model has no tokenizer."""
        return encode(self.llm, prompt)

    def stats(self) -> EngineStats:
        """DistmkError: the engine has ended."""
        return self.llm.stats()


class TokenStream:
    """Lists of tokens, each list with all that came since the last; an async context whose end cancels what is unfinished."""

    def __init__(
        self, llm: EngineClient, mailbox: _Mailbox, prompts: Sequence[str | Sequence[int]], params: SamplingParams
    ) -> None:
        self._llm = llm
        self._mailbox = mailbox
        self._prompts = prompts
        self._params = params
        self._inbox = _Inbox()
        self._requests: list[SubmittedRequest] = []
        self._running: set[int] = set()

    async def __aenter__(self) -> TokenStream:
        try:
            for prompt in self._prompts:
                ids = encode(self._llm, prompt)
                for params in one_by_one(self._params):
                    await asyncio.sleep(0)  # others go on between the completions of a large request
                    index = len(self._requests)
                    deliver = functools.partial(self._mailbox.deliver, self._inbox, index)
                    self._requests.append(self._llm.submit(ids, params, deliver))
                    self._running.add(index)
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
            for index, output in await self._inbox.take():
                if isinstance(output, BaseException):
                    self._running.clear()  # ended with the engine
                    raise output.with_traceback(None)
                if output.finish_reason is not None:
                    self._running.discard(index)
                outputs.append(output if output.index == index else replace(output, index=index))
            yield outputs

    def prompt_logprobs(self, index: int) -> Sequence[Mapping[int, Logprob] | None] | None:
        """Of the prompt of completion `index`, by position, None for the first; known from its first token on."""
        return self._requests[index].prompt_logprobs

    def _cancel(self) -> None:
        while self._running:
            self._llm.cancel(self._requests[self._running.pop()])


def encode(llm: EngineClient, prompt: str | Sequence[int]) -> list[int]:
    """The token ids of a prompt. UsageError: text cannot be encoded, or is far too long, or the model has no tokenizer."""
    if not isinstance(prompt, str):
        return list(prompt)
    if llm.tokenizer is None:
        raise UsageError("this model has no tokenizer; give token ids instead of text")
    return llm.tokenizer.encode(prompt, max_tokens=llm.max_model_len)


class _Inbox:
    """Outputs for one stream, on the event loop's thread."""

    def __init__(self) -> None:
        self._items: list[tuple[int, TokenOutput | BaseException]] = []
        self._came = asyncio.Event()

    def put(self, index: int, output: TokenOutput | BaseException) -> None:
        self._items.append((index, output))
        self._came.set()

    async def take(self) -> list[tuple[int, TokenOutput | BaseException]]:
        """All outputs since the last call, at least one."""
        await self._came.wait()
        self._came.clear()
        items, self._items = self._items, []
        return items


class _Mailbox:
    """Moves outputs from the engine's thread to the event loop: one wake-up for all that came since the last one."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._items: deque[tuple[_Inbox, int, TokenOutput | BaseException]] = deque()
        self._woken = False

    def deliver(self, inbox: _Inbox, index: int, output: TokenOutput | BaseException) -> None:
        """On the engine's thread."""
        self._items.append((inbox, index, output))
        if not self._woken:
            self._woken = True
            with contextlib.suppress(RuntimeError):  # the loop has ended, and nobody reads
                self.loop.call_soon_threadsafe(self._distribute)

    def _distribute(self) -> None:
        self._woken = False  # before the items are taken: one that comes later wakes the loop again
        while self._items:
            inbox, index, output = self._items.popleft()
            inbox.put(index, output)
