"""How answers reach a client that may leave at any time: whole, or as a stream of server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack
from typing import Any, TypeVar

from fastapi import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from distmk.errors import DistmkError
from distmk.server.errors import ERROR_KEY, ApiError, api_error

T = TypeVar("T")

CLIENT_LEFT = 499  # nginx's status; nobody reads it


class ClientLeftError(Exception):
    """The client closed its connection before the answer was whole."""


async def until_client_leaves(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns; it is cancelled when the client leaves, and ClientLeftError raised. The body must have been read."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientLeftError
    finally:
        for each in (task, watch):
            each.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(task, watch, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def whole_answer(request: HttpRequest, work: Coroutine[Any, Any, Response]) -> Response:
    """The response that `work` makes, unless the client leaves before."""
    try:
        return await until_client_leaves(request.receive, work)
    except ClientLeftError:
        return Response(status_code=CLIENT_LEFT)


def to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


DONE = "data: [DONE]\n\n"  # behind OpenAI's streams of choices


def event(value: Any, name: str | None = None) -> str:
    """A server-sent event."""
    return ("" if name is None else f"event: {name}\n") + f"data: {to_json(value)}\n\n"


class EventStream(Response):
    """Sends text in pieces of whole events. `failure`: the events that end a stream which has met an error. `resources` are
    closed with it, also if the client leaves.
    """

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncIterator[str], failure: Callable[[ApiError], str], resources: AsyncExitStack
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._failure = failure
        self._resources = resources

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._resources:
            with contextlib.suppress(ClientLeftError):
                await until_client_leaves(receive, self._send(scope, send))

    async def _send(self, scope: Scope, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async for text in self._events:
                await send({"type": "http.response.body", "body": text.encode(), "more_body": True})
        except DistmkError as error:
            known = api_error(error)
            scope[ERROR_KEY] = known.message
            await send({"type": "http.response.body", "body": self._failure(known).encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
