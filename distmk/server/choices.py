"""The choices of an answer, as their tokens come: what both endpoints that generate have in common."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, Protocol

from fastapi import Request
from starlette.responses import Response

from distmk.engine.sampling_params import SamplingParams, TokenOutput
from distmk.server.answers import EventStream, event, whole_answer
from distmk.server.body_types import Generating, StreamOptions
from distmk.server.errors import ApiError
from distmk.server.generation import Generation, as_bad_request, generation
from distmk.server.openai_logprobs import ScoredToken, scored
from distmk.server.records import record_of
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


@dataclass(frozen=True)
class Endpoint:
    """How an endpoint calls its answers, their pieces and ids, and the parameters for the prompt and for log probabilities."""

    kind: str
    piece_kind: str
    id_prefix: str
    prompt: str
    logprobs: str = "logprobs"

    def head(self, model: str, request_id: str, is_piece: bool = False) -> dict[str, Any]:
        """What every answer, and every piece of one, begins with."""
        kind = self.piece_kind if is_piece else self.kind
        return {
            "id": f"{self.id_prefix}-{request_id}",
            "object": kind,
            "created": int(time.time()),
            "model": model,
        }


class Answer(Protocol):
    """The answer to one request, whole or in pieces."""

    async def whole(self) -> Response: ...

    def piece(self, output: TokenOutput) -> dict[str, Any] | None:
        """The choice of an event; None: there is nothing to show of `output`."""
        ...


async def respond(
    endpoint: Endpoint,
    state: ServerState,
    request: Request,
    body: Generating,
    prompts: list[list[int]],
    make_params: Callable[[], SamplingParams],
    make_answer: Callable[[Generation], Answer],
) -> Response:
    """Generate for `prompts`, and answer whole or as a stream. ApiError: they cannot be served, or too many wait."""
    async with AsyncExitStack() as stack:
        with as_bad_request(endpoint.prompt, logprobs=endpoint.logprobs):
            running = await stack.enter_async_context(
                generation(state, prompts, make_params(), record_of(request.scope), body.only_prompt)
            )
        answer = make_answer(running)
        if not body.stream:
            return await whole_answer(request, answer.whole())
        beginning = endpoint.head(state.config.served_model_name, running.record.id, is_piece=True)
        return EventStream(_events(running, beginning, answer.piece, body.options), stack.pop_all())


def check_stream(body: Generating) -> None:
    """ApiError: parameters that go only with a stream, or only without one."""
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream: true", "stream_options")
    if body.prompt_logprobs is not None and body.stream:
        raise ApiError(400, "prompt_logprobs does not go with stream: true", "prompt_logprobs")


async def collect(running: Generation) -> list[Choice]:
    """All choices, whole. DistmkError: the engine has ended."""
    choices = [Choice(index) for index in range(running.num_choices)]
    async for outputs in running.outputs():
        for output in outputs:
            choices[output.index].add(output)
    return choices


async def _events(
    running: Generation,
    beginning: dict[str, Any],
    piece: Callable[[TokenOutput], dict[str, Any] | None],
    options: StreamOptions,
) -> AsyncIterator[str]:
    """The events of a stream: one for each token that `piece` shows anything of, as a choice, then the usage."""

    def one(choices: list[dict[str, Any]], usage: dict[str, int] | None) -> str:
        more = {"usage": usage} if options.include_usage or options.continuous_usage_stats else {}
        return event({**beginning, "choices": choices, **more})

    async for outputs in running.outputs():
        usage = running.usage() if options.continuous_usage_stats else None
        shown = [choice for output in outputs if (choice := piece(output)) is not None]
        if shown:
            yield "".join(one([choice], usage) for choice in shown)
    if options.include_usage:
        yield one([], running.usage())
