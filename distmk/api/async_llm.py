"""An engine for asyncio: any number of tasks generate at once. The HTTP server stands on this."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol, TypeVar

from distmk.api.input_processor import InputProcessor, check_max_tokens
from distmk.api.prompts import Prompt, Prompts
from distmk.engine.request import Deliver, Request
from distmk.engine.sampling_params import SamplingParams
from distmk.engine.stats import EngineStats
from distmk.engine.token_output import Logprob, TokenOutput
from distmk.errors import UsageError, shown
from distmk.text.chat.messages import ChatPrompt
from distmk.text.token_speller import token_strings
from distmk.text.tokenizer import Tokenizer

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


class AsyncLLM:
    """Generates tokens on an event loop, from an engine whose thread delivers them. Long prompts are encoded in a thread."""

    def __init__(self, llm: EngineClient) -> None:
        self._llm = llm
        self._mailbox: _Mailbox | None = None

    @property
    def model(self) -> str:
        """The path or name that the model was loaded from."""
        return self._llm.model

    @property
    def tokenizer(self) -> Tokenizer | None:
        """None: the model has none, and takes token ids only."""
        return self._llm.inputs.tokenizer

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest sequence, prompt and completion together."""
        return self._llm.inputs.max_model_len

    @property
    def max_num_seqs(self) -> int:
        """Sequences that run at once."""
        return self._llm.max_num_seqs

    @property
    def sampling_defaults(self) -> Mapping[str, Any]:
        """Fields of `SamplingParams` that a request without them has, by name."""
        return self._llm.inputs.sampling_defaults

    @property
    def chat_template(self) -> str:
        """The text of the model's chat templates; "" if it has none. ModelError: its files are damaged."""
        chat = self._llm.inputs.chat
        return "" if chat is None else chat.template_text

    async def generate(self, prompt: Prompt, params: SamplingParams) -> AsyncGenerator[TokenOutput, None]:
        """The tokens of a prompt as they come; `index` tells the completions of `params.n` apart.

        Closing the generator, or cancelling its task, cancels the request. UsageError: the request cannot be served.
        DistmkError: the engine has ended.
        """
        async with self.submit([prompt], params) as stream:
            async for outputs in stream:
                for output in outputs:
                    yield output

    def submit(self, prompts: Prompts, params: SamplingParams, *, must_fit: bool = False) -> TokenStream:
        """The completions of several prompts in one stream: `index` is the prompt's number * n + the completion's number.

        A seeded completion has the seed plus its number within the prompt, as in vLLM. `must_fit`: `max_tokens` for which the
        context has no room are a UsageError; else a completion ends where the context does. Errors come when the stream is
        entered.
        """
        loop = asyncio.get_running_loop()
        if self._mailbox is None or self._mailbox.loop is not loop:
            self._mailbox = _Mailbox(loop)
        return TokenStream(self._llm, self._mailbox, prompts, params, must_fit)

    async def tokenize(self, prompt: str | ChatPrompt) -> list[int]:
        """Token ids of text or a conversation, of any number. UsageError: see `InputProcessor.encode`."""
        encoded = await in_thread_if_long(lambda: self._llm.inputs.encode(prompt), text_size(prompt))
        return encoded.token_ids

    async def detokenize(self, ids: Sequence[int]) -> str:
        """The text of token ids, with special tokens. UsageError: one is not a token of this model."""
        tokenizer = self.tokenizer
        if tokenizer is None:
            raise UsageError("this model has no tokenizer")

        def decode() -> str:
            for token_id in ids:
                if not tokenizer.has_token(token_id):
                    raise UsageError(f"token id {shown(token_id)} is not a token of this model")
            return tokenizer.decode(ids, skip_special=False)

        return await in_thread_if_long(decode, 4 * len(ids))

    async def token_strings(self, ids: Sequence[int]) -> list[str] | None:
        """The tokens of a text for users to read; None: the model has no tokenizer."""
        tokenizer = self.tokenizer
        if tokenizer is None:
            return None
        return await in_thread_if_long(lambda: token_strings(tokenizer, ids), 4 * len(ids))

    def stats(self) -> EngineStats:
        """DistmkError: the engine has ended."""
        return self._llm.stats()


class TokenStream:
    """Lists of tokens, each with all tokens since the last list. It is an async context; its end cancels unfinished requests."""

    def __init__(
        self, llm: EngineClient, mailbox: _Mailbox, prompts: Prompts, params: SamplingParams, must_fit: bool
    ) -> None:
        self._llm, self._mailbox = llm, mailbox
        self._prompts, self._params, self._must_fit = prompts, params, must_fit
        self._inbox = _Inbox()
        self._requests: list[Request] = []  # by index
        self._running: set[int] = set()

    async def __aenter__(self) -> TokenStream:
        num_prompts = len(self._prompts) if isinstance(self._prompts, list) else 1
        size = text_size(self._prompts) + _REQUEST_CHARS * self._params.n * num_prompts
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
    def prompts(self) -> list[list[int]]:
        """The token ids of each prompt, once the stream is entered."""
        return [request.prompt_ids for request in self._requests if not request.number]

    def prompt_logprobs(self, index: int) -> Sequence[Mapping[int, Logprob] | None] | None:
        """Log probabilities of the prompt of completion `index` by position, None for the first; known with its first token."""
        return self._requests[index].prompt_logprobs

    def _make_requests(self) -> list[Request]:
        requests = self._llm.inputs.make_requests(self._prompts, self._params)
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


class _Mailbox:
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
