"""/v1/chat/completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from distmk.engine.sampling_params import SamplingParams, TokenOutput
from distmk.server.bodies import bounded_route
from distmk.server.body_types import ChatRequest, Messages
from distmk.server.choices import Choice, Endpoint, check_stream, collect, respond
from distmk.server.errors import ApiError
from distmk.server.generation import THREAD_CHARS, Generation, as_bad_request, fit_max_tokens, in_thread_if_long
from distmk.server.openai_logprobs import chat_logprobs, prompt_logprobs
from distmk.server.state import ServerState
from distmk.text.chat.messages import ChatOptions

ENDPOINT = Endpoint("chat.completion", "chat.completion.chunk", "chatcmpl", prompt="messages", logprobs="top_logprobs")


def router(state: ServerState) -> APIRouter:
    """The route, for one server."""
    routes = APIRouter(route_class=bounded_route(state))

    @routes.post("/v1/chat/completions", response_model=None)
    async def create(body: ChatRequest, request: Request) -> Response:
        state.check_serving()
        state.check_model(body.model)
        check_stream(body)
        ids = await render(state, body.messages, body.chat_options)
        return await respond(
            ENDPOINT,
            state,
            request,
            body,
            [ids],
            lambda: _params(state, body, ids),
            lambda running: _Answer(state, body, running),
        )

    return routes


async def render(state: ServerState, messages: Messages, options: ChatOptions) -> list[int]:
    """Token ids of a conversation. ApiError: the messages are wrong, or the model's template refuses them, or there is none; or
    the template comes with the request, and the server does not trust it.
    """
    if options["chat_template"] is not None and not state.config.trust_request_chat_template:
        message = "chat_template is the server's to choose; it takes another with --trust-request-chat-template only"
        raise ApiError(400, message, "chat_template")

    def encode() -> list[int]:
        return state.llm.llm.render_chat(messages, **options)

    with as_bad_request("messages", only_prompt=True):
        return await in_thread_if_long(encode, sum(map(_size, messages)))


def _size(message: Mapping[str, Any]) -> int:
    """Characters of a message and of the template around it, nearly. A list counts as long."""
    content = message.get("content")
    return 32 + (len(content) if isinstance(content, str) else THREAD_CHARS if content else 0)


def _params(state: ServerState, body: ChatRequest, ids: list[int]) -> SamplingParams:
    name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if asked is not None and asked < 1:
        raise ApiError(400, f"{name} is {asked}; expected 1 or more", name)
    defaults = state.sampling_defaults
    max_tokens = fit_max_tokens(asked, defaults.get("max_tokens"), [ids], state, ("messages", name))
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", "top_logprobs")
    num_top = (body.top_logprobs or 0) if body.logprobs else None
    return body.sampling_params(defaults, max_tokens=max_tokens, logprobs=num_top, prompt_logprobs=body.prompt_logprobs)


class _Answer:
    """The answer to one request, whole or in pieces."""

    def __init__(self, state: ServerState, body: ChatRequest, running: Generation) -> None:
        self._state = state
        self._body = body
        self._running = running
        self._begun: set[int] = set()  # choices of which a piece was sent

    async def whole(self) -> Response:
        choices = [self._whole(choice) for choice in await collect(self._running)]
        answer = ENDPOINT.head(self._state.config.served_model_name, self._running.record.id)
        if self._body.prompt_logprobs is not None:
            answer["prompt_logprobs"] = prompt_logprobs(self._running.prompt_logprobs(0))
        return JSONResponse({**answer, "choices": choices, "usage": self._running.usage()})

    def _whole(self, choice: Choice) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None, "annotations": []}
        made = {"index": choice.index, "message": message, "logprobs": self._logprobs(choice), **choice.ending}
        return made | self._ids(choice)

    def piece(self, output: TokenOutput) -> dict[str, Any] | None:
        choice = Choice.of(output)
        logprobs, ids = self._logprobs(choice), self._ids(choice)
        begins = output.index not in self._begun
        if not (begins or output.text or output.finish_reason or ids or logprobs):
            return None
        self._begun.add(output.index)
        delta: dict[str, Any] = {"role": "assistant"} if begins else {}
        if begins or output.text:
            delta["content"] = output.text
        return {"index": output.index, "delta": delta, "logprobs": logprobs, **choice.ending} | ids

    def _logprobs(self, choice: Choice) -> dict[str, Any] | None:
        if not self._body.logprobs:
            return None
        return chat_logprobs(choice.scored, self._body.top_logprobs or 0)

    def _ids(self, choice: Choice) -> dict[str, Any]:
        return {"token_ids": choice.token_ids} if self._body.return_token_ids else {}
