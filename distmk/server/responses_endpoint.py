"""/v1/responses, without state: nothing of a response is kept."""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse
from starlette.responses import Response

from distmk.server.answer_reader import chat_params, make_readers
from distmk.server.answers import event
from distmk.server.body_reader import bounded_route
from distmk.server.errors import ApiError
from distmk.server.generation import Generation
from distmk.server.respond import respond
from distmk.server.responses_body import ResponsesBody
from distmk.server.responses_items import ResponseItems
from distmk.server.state import ServerState
from distmk.server.tools import read_choice

_INCOMPLETE = {"length": {"reason": "max_output_tokens"}, "abort": None}  # OpenAI's details for the engine's reasons


def router(state: ServerState) -> APIRouter:
    """The route, for one server."""
    routes = APIRouter(route_class=bounded_route(state))

    @routes.post("/v1/responses", response_model=None)
    async def create(body: ResponsesBody, http: HttpRequest) -> Response:
        body.check()
        choice = read_choice(state, body.tools, body.tool_choice, body.parallel_tool_calls)
        given = {"max_tokens": body.max_output_tokens, "logprobs": body.num_logprobs}
        params = chat_params(state, body, body.tools, choice, **given)

        async def make_answer(running: Generation) -> _Answer:
            return _Answer(state, body, running)

        return await respond(state, http, body, params, make_answer)

    return routes


class _Answer:
    """A response, whole or as a stream of events."""

    def __init__(self, state: ServerState, body: ResponsesBody, running: Generation) -> None:
        self._model = state.config.served_model_name
        self._body = body
        self._running = running
        self._created_s = int(time.time())
        (reader,) = make_readers(state, running, body.tools, body.parallel_tool_calls)
        self._items = ResponseItems(reader, running.record.id, body.num_logprobs)
        self._numbers = itertools.count()
        self._finish_reason: str | None = None

    async def whole(self) -> Response:
        async for _ in self._new_events():
            pass
        return JSONResponse(self._response())

    async def events(self) -> AsyncIterator[str]:
        begun = self._response()
        yield self._told({"type": f"response.{name}", "response": begun} for name in ("created", "in_progress"))
        async for events in self._new_events():
            yield self._told(events)
        response = self._response()
        yield self._told([{"type": f"response.{response['status']}", "response": response}])

    def failure(self, error: ApiError) -> str:
        """The response's end, which has the error."""
        problem = {"code": "server_error", "message": error.message}
        failed = {**self._response(), "status": "failed", "error": problem}
        return self._told([{"type": "response.failed", "response": failed}])

    async def _new_events(self) -> AsyncIterator[list[dict[str, Any]]]:
        """The events of all tokens that came at once."""
        async for outputs in self._running.outputs():
            events = [each for output in outputs for each in self._items.add(output)]
            self._finish_reason = outputs[-1].finish_reason
            if events:
                yield events

    def _told(self, events: Any) -> str:
        """Server-sent events, numbered."""
        return "".join(event({**each, "sequence_number": next(self._numbers)}, each["type"]) for each in events)

    def _response(self) -> dict[str, Any]:
        """The response so far, with the parameters that made it."""
        body, params, reason = self._body, self._running.params, self._finish_reason
        is_over = reason is not None
        return {
            "id": f"resp_{self._running.record.id}",
            "object": "response",
            "created_at": self._created_s,
            "status": "incomplete" if reason in _INCOMPLETE else "completed" if is_over else "in_progress",
            "error": None,
            "incomplete_details": _INCOMPLETE.get(reason or ""),
            "background": False,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": None,
            "metadata": body.metadata or {},
            "model": self._model,
            "output": self._items.items if is_over else [],
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "service_tier": "default",
            "store": False,
            "temperature": params.temperature,
            "text": {"format": (body.text and body.text.format) or {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": self._usage() if is_over else None,
            "user": None,
        }

    def _usage(self) -> dict[str, Any]:
        used = self._running.usage()
        reasoning = used.get("completion_tokens_details", {"reasoning_tokens": 0})
        return {
            "input_tokens": used["prompt_tokens"],
            "input_tokens_details": {**used["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": used["completion_tokens"],
            "output_tokens_details": reasoning,
            "total_tokens": used["total_tokens"],
        }
