"""/v1/completions."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from distmk.server.bodies import bounded_route
from distmk.server.choices import Choice, Endpoint, check_stream, collect, respond
from distmk.server.errors import ApiError
from distmk.server.generation import THREAD_CHARS, Generation, fit_max_tokens, naming, off_loop
from distmk.server.logprobs import TokenLogprobs, completion_logprobs, prompt_logprobs
from distmk.server.requests import DEFAULT_COMPLETION_TOKENS, CompletionRequest
from distmk.server.state import ServerState
from distmk.serving.chat.messages import ChatPrompt
from distmk.serving.prompts import read_prompts
from distmk.serving.sampling import SamplingParams, TokenOutput

ENDPOINT = Endpoint("text_completion", "text_completion", "cmpl", prompt="prompt")


def router(state: ServerState) -> APIRouter:
    """The route, for one server."""
    routes = APIRouter(route_class=bounded_route(state))

    @routes.post("/v1/completions", response_model=None)
    async def create(body: CompletionRequest, request: Request) -> Response:
        state.check_serving()
        state.check_model(body.model)
        check_stream(body)
        texts, ids = await _encode(state, body)
        return await respond(
            ENDPOINT,
            state,
            request,
            body,
            ids,
            lambda: _params(state, body, ids),
            lambda running: _Answer(state, body, texts, running),
        )

    return routes


async def _encode(state: ServerState, body: CompletionRequest) -> tuple[list[str], list[list[int]]]:
    """The prompts as text (only for `echo`) and as token ids."""
    if body.prompt is None:
        raise ApiError(400, "prompt is missing", "prompt")

    def encode() -> tuple[list[str], list[list[int]]]:
        prompts = [p for p in read_prompts(body.prompt) if not isinstance(p, ChatPrompt)]  # which JSON cannot hold
        if not prompts:
            raise ApiError(400, "prompt is an empty list; give at least one", "prompt")
        state.check_count(len(prompts))
        ids = [state.llm.encode(prompt) for prompt in prompts]
        if not all(ids):
            raise ApiError(400, "a prompt is empty; give it at least one token", "prompt")
        if not body.echo:
            return [], ids
        return [p if isinstance(p, str) else _decode(state, p) for p in prompts], ids

    with naming("prompt", only_prompt=True):
        return await off_loop(encode, _size(body.prompt))


def _size(prompt: Any) -> int:
    """Characters and token ids, nearly."""
    if isinstance(prompt, list):
        return len(prompt) + sum(len(each) for each in prompt[:THREAD_CHARS] if isinstance(each, str | list))
    return len(prompt) if isinstance(prompt, str) else 0


def _decode(state: ServerState, ids: list[int]) -> str:
    return "" if state.tokenizer is None else state.tokenizer.decode(ids)


def _params(state: ServerState, body: CompletionRequest, ids: list[list[int]]) -> SamplingParams:
    if body.max_tokens == 0 and body.echo:  # only the prompt is asked for; the one token is not shown
        asked: int | None = 1
    else:
        asked = body.max_tokens
    if asked is not None and asked < 1:
        raise ApiError(400, f"max_tokens is {asked}; expected 1 or more (0 only with echo)", "max_tokens")
    max_tokens = fit_max_tokens(asked, DEFAULT_COMPLETION_TOKENS, ids, state, ("prompt", "max_tokens"))
    of_prompt = body.prompt_logprobs
    if of_prompt is None and body.echo:
        of_prompt = body.logprobs
    return body.sampling_params(max_tokens=max_tokens, logprobs=body.logprobs, prompt_logprobs=of_prompt)


class _Answer:
    """The answer to one request, whole or in pieces."""

    def __init__(self, state: ServerState, body: CompletionRequest, texts: list[str], running: Generation) -> None:
        self._state = state
        self._body = body
        self._texts = texts
        self._running = running
        self._shows_tokens = not (body.echo and body.max_tokens == 0)
        self._begun: set[int] = set()  # choices of which a piece was sent
        # Characters of each choice in front of the next token: the prompt's count with its log probabilities.
        scored = self._scores_prompt
        self._offsets = [0 if scored else len(self._prompt_text(i)) for i in range(running.num_choices)]

    def _prompt_text(self, choice: int) -> str:
        return self._texts[choice // self._running.params.n] if self._texts else ""

    async def whole(self) -> Response:
        choices = [self._whole(choice) for choice in await collect(self._running)]
        answer = ENDPOINT.head(self._state.config.served_model_name, self._running.record.id)
        return JSONResponse({**answer, "choices": choices, "usage": self._running.usage()})

    def _whole(self, choice: Choice) -> dict[str, Any]:
        echoed = self._echoed(choice.index)
        tokens = choice.tokens if self._shows_tokens else []
        text = self._prompt_text(choice.index) + (choice.text if self._shows_tokens else "")
        made = self._choice(choice.index, text, choice.finish_reason, [*echoed, *tokens], offset=0)
        if self._body.prompt_logprobs is not None:
            made["prompt_logprobs"] = prompt_logprobs(
                self._state.tokenizer, self._running.prompt_logprobs(choice.index)
            )
        return made | self._ids([token_id for token_id, _ in tokens])

    def piece(self, output: TokenOutput) -> dict[str, Any] | None:
        index, num_top = output.index, self._body.logprobs
        text, offset = output.text if self._shows_tokens else "", self._offsets[index]
        is_token = self._shows_tokens and output.finish_reason != "abort"
        tokens: list[TokenLogprobs] = [(output.token_id, output.logprobs)] if is_token else []
        ids = self._ids([token_id for token_id, _ in tokens])
        if index not in self._begun:
            self._begun.add(index)
            text, tokens = self._prompt_text(index) + text, [*self._echoed(index), *tokens]
        elif not (text or ids or output.finish_reason or num_top is not None):
            return None
        made = self._choice(index, text, output.finish_reason, tokens, offset)
        if made["logprobs"] is not None:
            self._offsets[index] += sum(map(len, made["logprobs"]["tokens"]))
        return made | ids

    @property
    def _scores_prompt(self) -> bool:
        return self._body.echo and self._body.logprobs is not None

    def _echoed(self, index: int) -> list[TokenLogprobs]:
        """The prompt's tokens with their log probabilities, if these are asked for; once the choice has a token."""
        if not self._scores_prompt:
            return []
        prompt = self._running.prompt_of(index)
        found = self._running.prompt_logprobs(index)
        return list(zip(prompt, found or [None] * len(prompt), strict=True))

    def _choice(
        self, index: int, text: str, finish_reason: str | None, tokens: list[TokenLogprobs], offset: int
    ) -> dict[str, Any]:
        num_top = self._body.logprobs
        logprobs = None if num_top is None else completion_logprobs(self._state.tokenizer, tokens, num_top, offset)
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}

    def _ids(self, token_ids: list[int]) -> dict[str, Any]:
        return {"token_ids": token_ids} if self._body.return_token_ids else {}
