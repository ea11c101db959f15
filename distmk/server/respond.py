"""From the body of a request to its answer, whole or as a stream. All endpoints that generate have this."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, Protocol

from fastapi import Request as HttpRequest
from starlette.responses import Response

from distmk import SamplingParams, TokenOutput
from distmk.server.answers import DONE, EventStream, event, whole_answer
from distmk.server.bodies import SamplingBody, StreamOptions
from distmk.server.errors import ApiError, as_bad_request
from distmk.server.generation import Generation, generation
from distmk.server.request_log import record_of
from distmk.server.state import ServerState


class Answer(Protocol):
    """The answer to one request, whole or as a stream."""

    async def whole(self) -> Response: ...

    def events(self) -> AsyncIterator[str]:
        """The server-sent events of the stream, to its end. DistmkError: the engine has ended."""
        ...

    def failure(self, error: ApiError) -> str:
        """The events that end a stream which has met an error."""
        ...


async def respond(
    state: ServerState,
    http: HttpRequest,
    body: SamplingBody,
    params: SamplingParams,
    make_answer: Callable[[Generation], Awaitable[Answer]],
) -> Response:
    """Generate what `body` asks for, and answer whole or as a stream. ApiError: it cannot be served, or too many wait."""
    body.check_stream()
    async with AsyncExitStack() as stack:
        with as_bad_request(body.names):
            running = await stack.enter_async_context(generation(state, body, params, record_of(http.scope)))
            answer = await make_answer(running)
        if not body.stream:
            return await whole_answer(http, answer.whole())
        return EventStream(answer.events(), answer.failure, stack.pop_all())


@dataclass(frozen=True)
class Endpoint:
    """How an endpoint calls its answers, their pieces and ids."""

    kind: str
    piece_kind: str
    id_prefix: str

    def head(self, model: str, request_id: str, is_piece: bool = False) -> dict[str, Any]:
        """What every answer, and every piece of one, begins with."""
        kind = self.piece_kind if is_piece else self.kind
        return {
            "id": f"{self.id_prefix}-{request_id}",
            "object": kind,
            "created": int(time.time()),
            "model": model,
        }


class ChoicesAnswer:
    """An answer of choices, as of /v1/completions and /v1/chat/completions."""

    def __init__(self, endpoint: Endpoint, model: str, running: Generation, options: StreamOptions) -> None:
        self._endpoint = endpoint
        self._model = model
        self._running = running
        self._options = options

    def head(self, is_piece: bool = False) -> dict[str, Any]:
        return self._endpoint.head(self._model, self._running.record.id, is_piece)

    def pieces(self, output: TokenOutput) -> list[dict[str, Any]]:
        """The choices of the events that show `output`."""
        raise NotImplementedError

    async def events(self) -> AsyncIterator[str]:
        """The events of each token that is shown, with a choice each, then the usage."""
        running, options, beginning = self._running, self._options, self.head(is_piece=True)

        def one(choices: list[dict[str, Any]], usage: dict[str, Any] | None) -> str:
            more = {"usage": usage} if options.include_usage or options.continuous_usage_stats else {}
            return event({**beginning, "choices": choices, **more})

        async for outputs in running.outputs():
            usage = running.usage() if options.continuous_usage_stats else None
            shown = [choice for output in outputs for choice in self.pieces(output)]
            if shown:
                yield "".join(one([choice], usage) for choice in shown)
        yield (one([], running.usage()) if options.include_usage else "") + DONE

    def failure(self, error: ApiError) -> str:
        return event(error.body()) + DONE
