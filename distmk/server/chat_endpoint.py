"""/v1/chat/completions."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse
from starlette.responses import Response

from distmk import SamplingParams, TokenOutput
from distmk.server.bodies import ChatCompletionBody, bounded_route
from distmk.server.errors import ApiError
from distmk.server.generation import Choice, Endpoint, Generation, collect, respond
from distmk.server.openai_logprobs import chat_logprobs, prompt_logprobs
from distmk.server.state import ServerState

ENDPOINT = Endpoint("chat.completion", "chat.completion.chunk", "chatcmpl")


def router(state: ServerState) -> APIRouter:
    """The route, for one server."""
    routes = APIRouter(route_class=bounded_route(state))

    @routes.post("/v1/chat/completions", response_model=None)
    async def create(body: ChatCompletionBody, http: HttpRequest) -> Response:
        check_template(state, body.chat_template)

        async def make_answer(running: Generation) -> _Answer:
            return _Answer(state, body, running)

        return await respond(ENDPOINT, state, http, body, _params(state, body), make_answer)

    return routes


def check_template(state: ServerState, given: str | None) -> None:
    """ApiError: a request comes with a chat template, and the server does not trust it."""
    if given is not None and not state.config.trust_request_chat_template:
        message = "chat_template is the server's to choose; it takes another with --trust-request-chat-template only"
        raise ApiError(400, message, "chat_template")


def _params(state: ServerState, body: ChatCompletionBody) -> SamplingParams:
    asked = body.num_tokens_asked
    if asked is not None and asked < 1:
        name = body.names["max_tokens"]
        raise ApiError(400, f"{name} is {asked}; expected 1 or more", name)
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", "top_logprobs")
    num_top = (body.top_logprobs or 0) if body.logprobs else None
    defaults = {"max_tokens": None, **state.llm.sampling_defaults}
    return body.sampling_params(defaults, max_tokens=asked, logprobs=num_top, prompt_logprobs=body.prompt_logprobs)


class _Answer:
    """The answer to one request, whole or in pieces."""

    def __init__(self, state: ServerState, body: ChatCompletionBody, running: Generation) -> None:
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
