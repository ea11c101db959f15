"""One request for completions, from token ids to token outputs, with its metrics."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import TypeVar

from distmk.api.async_llm import TokenStream
from distmk.engine.sampling_params import Logprob, SamplingParams, TokenOutput
from distmk.errors import DistmkError, UsageError
from distmk.server.errors import ApiError, api_error
from distmk.server.metrics import RequestTimes
from distmk.server.records import RequestRecord
from distmk.server.state import ServerState

T = TypeVar("T")

THREAD_CHARS = 2048
"""From this length on, text is encoded in a thread: it takes a millisecond or more, in which the event loop would stand still."""

_CHAT_NAMES = ("chat_template", "chat_template_kwargs", "continue_final_message")
_NAMES = {name: name for name in (*(field.name for field in fields(SamplingParams)), *_CHAT_NAMES)}


@contextlib.contextmanager
def as_bad_request(prompt: str, logprobs: str = "logprobs", only_prompt: bool = False) -> Iterator[None]:
    """UsageErrors of the block become status 400 and name the parameter.

    `prompt`, `logprobs`: how the endpoint calls the prompt and the number of log probabilities. `only_prompt`: the block reads
    nothing but the prompt.
    """
    try:
        yield
    except UsageError as error:
        about_prompt = dict.fromkeys(("a", "the", "this", "token", "prompt"), prompt)  # how such messages begin
        found = api_error(error, _NAMES | about_prompt | {"logprobs": logprobs})
        if found.param is None and only_prompt:
            found.param = prompt
        if found.param == logprobs:
            found.message = found.message.replace("logprobs", logprobs, 1)
        raise found from None


async def in_thread_if_long(work: Callable[[], T], num_chars: int) -> T:
    """Encode text of `num_chars` characters, in a thread if it is long."""
    return await asyncio.to_thread(work) if num_chars >= THREAD_CHARS else work()


def fit_max_tokens(
    asked: int | None, default: int | None, prompts: Sequence[Sequence[int]], state: ServerState, names: tuple[str, str]
) -> int:
    """max_tokens for `prompts`: what was `asked` for, or the `default`, or all that fits (None).

    `names`: the request's parameters for the prompt and for max_tokens. ApiError: a prompt does not fit, or the tokens asked for
    do not.
    """
    limit, longest = state.max_model_len, max(map(len, prompts))
    room = limit - longest
    if room < 1:
        message = f"{names[0]} has {longest} tokens and leaves no room in a context of {limit}; shorten it"
        raise ApiError(400, message, names[0], "context_length_exceeded")
    if asked is None:
        return room if default is None else min(default, room)
    if asked > room:
        message = (
            f"{names[1]} is {asked}; a prompt of {longest} tokens leaves room for 1 to {room} in a context of {limit}"
        )
        raise ApiError(400, message, names[1], "context_length_exceeded")
    return asked


class Generation:
    """The completions of a request's prompts; choice number = prompt's number * n + completion's number.

    `only_prompt`: nothing but the prompts is asked for (max_tokens: 0 with echo). The one token that an engine cannot do without
    is neither shown nor counted.
    """

    def __init__(
        self,
        state: ServerState,
        stream: TokenStream,
        prompts: list[list[int]],
        params: SamplingParams,
        record: RequestRecord,
        only_prompt: bool,
    ) -> None:
        self._state = state
        self._stream = stream
        self.prompts = prompts
        self.params = params
        self.record = record
        self._only_prompt = only_prompt
        now_s = time.perf_counter()
        self._times = [RequestTimes(now_s) for _ in range(self.num_choices)]
        self._reasons: dict[int, str] = {}  # of the completions that have ended

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.params.n

    def prompt_of(self, choice: int) -> list[int]:
        return self.prompts[choice // self.params.n]

    def prompt_logprobs(self, choice: int) -> Sequence[Mapping[int, Logprob] | None] | None:
        """By position, None for the first; known from the choice's first token on, if they were asked for."""
        return self._stream.prompt_logprobs(choice)

    def usage(self) -> dict[str, int]:
        """Token counts so far, in OpenAI's form."""
        prompt = sum(map(len, self.prompts))
        new = 0 if self._only_prompt else sum(times.num_tokens for times in self._times)
        return {"prompt_tokens": prompt, "total_tokens": prompt + new, "completion_tokens": new}

    async def outputs(self) -> AsyncIterator[list[TokenOutput]]:
        """Tokens as they come, all that came at once in one list. DistmkError: the engine has ended."""
        metrics = self._state.metrics
        async for outputs in self._until_error():
            now_s = time.perf_counter()
            for output in outputs:
                times = self._times[output.index]
                if output.finish_reason != "abort":
                    metrics.token(times, now_s)
                if output.finish_reason is not None:
                    self._reasons[output.index] = output.finish_reason
                    metrics.ended(times, output.finish_reason)
            yield [self._shown(output) for output in outputs]

    def _shown(self, output: TokenOutput) -> TokenOutput:
        if not self._only_prompt:
            return output
        reason = "abort" if output.finish_reason == "abort" else "length"
        return replace(output, token_id=-1, text="", finish_reason=reason, stop_reason=None)

    async def _until_error(self) -> AsyncIterator[list[TokenOutput]]:
        try:
            async for outputs in self._stream:
                yield outputs
        except DistmkError as error:
            self._state.engine_failed(error)
            raise

    def close(self) -> None:
        """Count the completions that did not end, and note for the log what came of all."""
        for index, times in enumerate(self._times):
            if index not in self._reasons:
                self._state.metrics.ended(times, "abort")
        self.record.prompt_tokens = sum(map(len, self.prompts))
        self.record.output_tokens = sum(times.num_tokens for times in self._times)
        self.record.finish_reasons = [self._reasons.get(index, "abort") for index in range(self.num_choices)]
        self.record.first_token_s = min((t.first_s for t in self._times if t.first_s is not None), default=None)


@contextlib.asynccontextmanager
async def generation(
    state: ServerState,
    prompts: list[list[int]],
    params: SamplingParams,
    record: RequestRecord,
    only_prompt: bool = False,
) -> AsyncIterator[Generation]:
    """Completions under way; the end of the block cancels those that have not ended. `only_prompt`: see `Generation`.

    UsageError: they cannot be served. ApiError: too many wait.
    """
    with state.admit(len(prompts) * params.n):
        async with state.llm.submit(prompts, params) as stream:
            for prompt in prompts:
                state.metrics.submitted(len(prompt), params.max_tokens or state.max_model_len, params.n)
            running = Generation(state, stream, prompts, params, record, only_prompt)
            try:
                yield running
            finally:
                running.close()
