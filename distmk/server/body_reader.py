"""How the JSON of requests is read: bounded in time whatever a client sends, as the event loop waits for it."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request as HttpRequest
from fastapi.routing import APIRoute
from pydantic_core import from_json
from starlette.responses import Response

from distmk.server.errors import ApiError
from distmk.server.state import ServerState

_BYTES_PER_TOKEN = 64  # about 4 as text, 8 as a number, 12 to 24 as text in escapes; and some prompts at once
_LEAST_BYTES, _MOST_BYTES = 2 << 20, 32 << 20
_MAX_VALUES = 1 << 20  # so many numbers take 20 ms to read
_MAX_NESTED = 1 << 16  # so many objects take 20 ms
_MAX_NAMES = 1 << 17  # so many take 50 ms if no two are the same
_MAX_PARAMETERS = 256
_MAX_ITEMS = 1024  # of a parameter that is a list or an object
_IN_CONTEXT = ("messages", "tokens", "input")  # each item has a token at least
_ANY_LENGTH = ("prompt",)  # which is checked outside of the event loop


def fitting_body_bytes(max_model_len: int) -> int:
    """The most bytes of a body for a model with a context of `max_model_len` tokens."""
    return min(max(_LEAST_BYTES, _BYTES_PER_TOKEN * max_model_len), _MOST_BYTES)


def bounded_route(state: ServerState) -> type[APIRoute]:
    """The route class for one server: it reads bodies with the bounds of this module."""

    class BoundedRequest(HttpRequest):
        async def json(self) -> Any:
            if not hasattr(self, "_json"):
                self._json = read_json(await self.body(), state.llm.max_model_len)
            return self._json

    class BoundedRoute(APIRoute):
        def get_route_handler(self) -> Callable[[HttpRequest], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()

            async def bounded(request: HttpRequest) -> Response:
                return await handle(BoundedRequest(request.scope, request.receive))

            return bounded

    return BoundedRoute


def read_json(body: bytes, max_model_len: int) -> Any:
    """The value that `body` is, none of whose parameters is too long to be checked item by item.

    ApiError: it is not JSON, or too large in one of its parts.
    """
    # Text may have these characters too; a text with so many has more tokens than the context.
    max_values, max_nested = max(_MAX_VALUES, 4 * max_model_len), max(_MAX_NESTED, max_model_len // 4)
    if body.count(b",") > max_values:
        raise ApiError(400, f"the body has more than {max_values} values; send fewer in one request")
    max_names = max(_MAX_NAMES, max_model_len)
    if body.count(b":") > max_names:
        raise ApiError(400, f"the body has more than {max_names} names; send fewer in one request")
    if body.count(b"[") + body.count(b"{") > max_nested:
        raise ApiError(400, f"the body has more than {max_nested} lists and objects; send fewer in one request")
    try:
        # It takes a third of the time of `json` in bad cases, and refuses deep nesting. A cache of strings doubles the time
        # of names that all differ.
        value = from_json(body, cache_strings="none")
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None
    if isinstance(value, dict):
        _check_sizes(value, max_model_len)
    return value


def _check_sizes(body: dict[str, Any], max_model_len: int) -> None:
    if len(body) > _MAX_PARAMETERS:
        raise ApiError(400, f"the body has {len(body)} parameters; at most {_MAX_PARAMETERS} can be given")
    for name, value in body.items():
        if not isinstance(value, list | dict) or name in _ANY_LENGTH:
            continue
        most = max_model_len if name in _IN_CONTEXT else _MAX_ITEMS
        if len(value) > most:
            raise ApiError(400, f"{name[:60]} has {len(value)} entries; at most {most} can be given", name[:60])
