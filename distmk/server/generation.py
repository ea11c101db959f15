"""The completions of one request, under way."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from distmk import SamplingParams, TokenOutput
from distmk.api.answer_constraints import is_constrained
from distmk.api.outputs import Logprob
from distmk.api.token_stream import TokenStream
from distmk.errors import DistmkError, RequestError
from distmk.server.bodies import SamplingBody
from distmk.server.metrics import RequestTimes
from distmk.server.openai_logprobs import ScoredToken, scored
from distmk.server.request_log import LogRecord
from distmk.server.state import ServerState


@dataclass
class Choice:
    """One choice so far."""

    index: int
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    scored: list[ScoredToken] = field(default_factory=list)  # the tokens, where log probabilities were asked for
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @classmethod
    def of(cls, output: TokenOutput) -> Choice:
        """What one token adds to its choice."""
        choice = cls(output.index)
        choice.add(output)
        return choice

    def add(self, output: TokenOutput) -> None:
        self.texts.append(output.text)
        if output.token_id >= 0:
            self.token_ids.append(output.token_id)
            token = scored(output.token_id, output.logprobs)
            self.scored += [] if token is None else [token]
        self.finish_reason, self.stop_reason = output.finish_reason, output.stop_reason

    @property
    def ending(self) -> dict[str, Any]:
        """Why it has ended: OpenAI's reason and vLLM's."""
        return {"finish_reason": self.finish_reason, "stop_reason": self.stop_reason}

    @property
    def text(self) -> str:
        return "".join(self.texts)


class Generation:
    """The completions of a request's prompts; choice number = prompt's number * n + completion's number.

    `only_prompt`: nothing but the prompts is asked for (max_tokens: 0 with echo). The one token that an engine cannot do without
    is neither shown nor counted.
    """

    def __init__(
        self,
        state: ServerState,
        stream: TokenStream,
        params: SamplingParams,
        record: LogRecord,
        only_prompt: bool,
    ) -> None:
        self._state = state
        self._stream = stream
        self.prompts = stream.prompts
        self.params = params
        self.record = record
        self._only_prompt = only_prompt
        now_s = time.perf_counter()
        self._times = [RequestTimes(now_s) for _ in range(self.num_choices)]
        self.num_reasoning_tokens: Callable[[], int] | None = None  # if they can be told apart
        self._reasons: dict[int, str] = {}  # of the completions that have ended

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.params.n

    def prompt_logprobs(self, choice: int) -> Sequence[Mapping[int, Logprob] | None] | None:
        """Log probabilities of a choice's prompt by position, None for the first; known from the choice's first token on, if
        asked for.
        """
        return self._stream.prompt_logprobs(choice)

    def usage(self) -> dict[str, Any]:
        """Token counts so far, in OpenAI's form."""
        prompt = sum(map(len, self.prompts))
        new = 0 if self._only_prompt else sum(times.num_tokens for times in self._times)
        usage: dict[str, Any] = {"prompt_tokens": prompt, "total_tokens": prompt + new, "completion_tokens": new}
        usage["prompt_tokens_details"] = {"cached_tokens": self._stream.num_cached_tokens}
        if self.num_reasoning_tokens is not None:
            usage["completion_tokens_details"] = {"reasoning_tokens": self.num_reasoning_tokens()}
        return usage

    async def outputs(self) -> AsyncIterator[list[TokenOutput]]:
        """Tokens as they come, all that came at once in one list. RequestError: a completion has failed. DistmkError: the engine
        has ended.
        """
        metrics = self._state.metrics
        async for outputs in self._until_error():
            now_s = time.perf_counter()
            for output in outputs:
                times = self._times[output.index]
                if output.token_id >= 0:
                    metrics.token(times, now_s)
                if output.finish_reason is not None:
                    self._reasons[output.index] = output.finish_reason
                    metrics.ended(times, output.finish_reason)
                if output.error is not None:
                    raise RequestError(output.error)
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
    state: ServerState, body: SamplingBody, params: SamplingParams, record: LogRecord
) -> AsyncIterator[Generation]:
    """Completions under way; the end of the block cancels unfinished ones.

    UsageError: they cannot be served. ApiError: too many wait.
    """
    with state.admit(body.model, body.num_prompts * params.n):
        must_fit = body.num_tokens_asked is not None
        parsers = state.parsers if is_constrained(params) else None
        async with state.llm.submit(body.prompts, params, must_fit=must_fit, parsers=parsers) as stream:
            for prompt in stream.prompts:
                room = state.llm.max_model_len - len(prompt)
                most = room if params.max_tokens is None else min(params.max_tokens, room)
                state.metrics.submitted(len(prompt), most, params.n)
            running = Generation(state, stream, params, record, body.only_prompt)
            try:
                yield running
            finally:
                running.close()


async def collect(running: Generation, each: Callable[[TokenOutput], object] | None = None) -> list[Choice]:
    """All choices, whole; `each`, if given, is called with every token. DistmkError: the engine has ended."""
    choices = [Choice(index) for index in range(running.num_choices)]
    async for outputs in running.outputs():
        for output in outputs:
            choices[output.index].add(output)
            if each is not None:
                each(output)
    return choices
