"""/v1/chat/completions."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse
from starlette.responses import Response

from distmk import SamplingParams, TokenOutput
from distmk.server.answer_reader import chat_params, make_readers
from distmk.server.bodies import ChatCompletionBody
from distmk.server.body_reader import bounded_route
from distmk.server.chat_message import ChatMessage
from distmk.server.errors import ApiError
from distmk.server.generation import Choice, Generation, collect
from distmk.server.openai_logprobs import chat_logprobs, prompt_logprobs
from distmk.server.respond import ChoicesAnswer, Endpoint, respond
from distmk.server.state import ServerState
from distmk.server.tools import read_choice

ENDPOINT = Endpoint("chat.completion", "chat.completion.chunk", "chatcmpl")


def router(state: ServerState) -> APIRouter:
    """The route, for one server."""
    routes = APIRouter(route_class=bounded_route(state))

    @routes.post("/v1/chat/completions", response_model=None)
    async def create(body: ChatCompletionBody, http: HttpRequest) -> Response:
        check_template(state, body.chat_template)

        async def make_answer(running: Generation) -> _Answer:
            return _Answer(state, body, running)

        return await respond(state, http, body, _params(state, body), make_answer)

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
    given = {"max_tokens": asked, "logprobs": num_top, "prompt_logprobs": body.prompt_logprobs}
    choice = read_choice(state, body.tools, body.tool_choice, body.parallel_tool_calls)
    return chat_params(state, body, body.tools, choice, **given)


class _Answer(ChoicesAnswer):
    def __init__(self, state: ServerState, body: ChatCompletionBody, running: Generation) -> None:
        super().__init__(ENDPOINT, state.config.served_model_name, running, body.options)
        self._body = body
        has_reasoning = state.parsers.reasoning is not None
        readers = make_readers(state, running, body.tools, body.parallel_tool_calls)
        self._messages = [ChatMessage(reader, has_reasoning, body.include_reasoning) for reader in readers]

    async def whole(self) -> Response:
        choices = await collect(self._running, lambda output: self._messages[output.index].add(output))
        answer = self.head()
        if self._body.prompt_logprobs is not None:
            answer["prompt_logprobs"] = prompt_logprobs(self._running.prompt_logprobs(0))
        made = [self._whole(choice) for choice in choices]
        return JSONResponse({**answer, "choices": made, "usage": self._running.usage()})

    def _whole(self, choice: Choice) -> dict[str, Any]:
        message = self._messages[choice.index].whole()
        made = {"index": choice.index, "message": message, "logprobs": self._logprobs(choice), **self._ending(choice)}
        return made | self._ids(choice)

    def pieces(self, output: TokenOutput) -> list[dict[str, Any]]:
        choice = Choice.of(output)
        deltas = self._messages[output.index].add(output)
        logprobs, ids = self._logprobs(choice), self._ids(choice)
        # As by OpenAI, the end of a message of calls is an event of its own.
        if (logprobs or ids or output.finish_reason) and (not deltas or "tool_calls" in deltas[-1]):
            deltas.append({})
        shown: list[dict[str, Any]] = [
            {"index": output.index, "delta": delta, "logprobs": None, "finish_reason": None, "stop_reason": None}
            for delta in deltas
        ]
        if shown:
            shown[-1] |= {"logprobs": logprobs, **self._ending(choice), **ids}
        return shown

    def _ending(self, choice: Choice) -> dict[str, Any]:
        reason = self._messages[choice.index].finish_reason(choice.finish_reason)
        return {**choice.ending, "finish_reason": reason}

    def _logprobs(self, choice: Choice) -> dict[str, Any] | None:
        if not self._body.logprobs:
            return None
        return chat_logprobs(choice.scored, self._body.top_logprobs or 0)

    def _ids(self, choice: Choice) -> dict[str, Any]:
        return {"token_ids": choice.token_ids} if self._body.return_token_ids else {}
