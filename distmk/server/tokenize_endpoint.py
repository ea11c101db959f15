"""vLLM's /tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from distmk.errors import UsageError, shown
from distmk.server.bodies import bounded_route
from distmk.server.body_types import DetokenizeRequest, TokenizeRequest
from distmk.server.chat_endpoint import render
from distmk.server.errors import ApiError
from distmk.server.generation import as_bad_request, in_thread_if_long
from distmk.server.state import ServerState
from distmk.text.token_speller import token_strings


def router(state: ServerState) -> APIRouter:
    """The routes, for one server."""
    routes = APIRouter(route_class=bounded_route(state))

    @routes.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        state.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "expected either prompt or messages", "prompt")
        if body.messages is not None:
            ids = await render(state, body.messages, body.chat_options)
        else:
            prompt = body.prompt or ""
            with as_bad_request("prompt", only_prompt=True):
                ids = await in_thread_if_long(lambda: state.llm.encode(prompt), len(prompt))
        answer: dict[str, Any] = {"count": len(ids), "max_model_len": state.max_model_len, "tokens": ids}
        if body.return_token_strs and (tokenizer := state.tokenizer) is not None:
            answer["token_strs"] = await in_thread_if_long(lambda: token_strings(tokenizer, ids), 4 * len(ids))
        return answer

    @routes.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> dict[str, str]:
        state.check_model(body.model)
        with as_bad_request("tokens", only_prompt=True):
            tokenizer = state.tokenizer
            if tokenizer is None:
                raise UsageError("this model has no tokenizer")
            ids = body.tokens

            def decode() -> str:
                for token_id in ids:
                    if not tokenizer.has_token(token_id):
                        raise UsageError(f"token id {shown(token_id)} is not a token of this model")
                return tokenizer.decode(ids, skip_special=False)

            return {"prompt": await in_thread_if_long(decode, 4 * len(ids))}

    return routes
