"""vLLM's /tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from distmk import ChatPrompt
from distmk.server.bodies import DetokenizeBody, TokenizeBody
from distmk.server.body_reader import bounded_route
from distmk.server.chat_endpoint import check_template
from distmk.server.errors import ApiError, as_bad_request
from distmk.server.state import ServerState


def router(state: ServerState) -> APIRouter:
    """The routes, for one server."""
    routes = APIRouter(route_class=bounded_route(state))

    @routes.post("/tokenize")
    async def tokenize(body: TokenizeBody) -> dict[str, Any]:
        state.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "expected either prompt or messages", "prompt")
        prompt: str | ChatPrompt = body.prompt or ""
        if body.messages is not None:
            check_template(state, body.chat_template)
            prompt = ChatPrompt(body.messages, **body.chat_options)
        with as_bad_request({"prompt": "prompt" if body.messages is None else "messages"}):
            ids = await state.llm.tokenize(prompt)
        answer: dict[str, Any] = {"count": len(ids), "max_model_len": state.llm.max_model_len, "tokens": ids}
        if body.return_token_strs and (strings := await state.llm.token_strings(ids)) is not None:
            answer["token_strs"] = strings
        return answer

    @routes.post("/detokenize")
    async def detokenize(body: DetokenizeBody) -> dict[str, str]:
        state.check_model(body.model)
        with as_bad_request({"prompt": "tokens"}):
            return {"prompt": await state.llm.detokenize(body.tokens)}

    return routes
