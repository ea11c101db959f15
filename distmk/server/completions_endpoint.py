"""/v1/completions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from distmk.api.prompts import read_prompts
from distmk.engine.sampling_params import SamplingParams, TokenOutput
from distmk.server.bodies import bounded_route
from distmk.server.body_types import DEFAULT_COMPLETION_TOKENS, CompletionRequest
from distmk.server.choices import Choice, Endpoint, check_stream, collect, respond
from distmk.server.errors import ApiError
from distmk.server.generation import THREAD_CHARS, Generation, as_bad_request, fit_max_tokens, in_thread_if_long
from distmk.server.openai_logprobs import ScoredToken, TextOffsets, completion_logprobs, prompt_logprobs, scored_prompt
from distmk.server.state import ServerState
from distmk.text.chat.messages import ChatPrompt

ENDPOINT = Endpoint("text_completion", "text_completion", "cmpl", prompt="prompt")


def router(state: ServerState) -> APIRouter:
    """The route, for one server."""
    routes = APIRouter(route_class=bounded_route(state))

    @routes.post("/v1/completions", response_model=None)
    async def create(body: CompletionRequest, request: Request) -> Response:
        state.check_serving()
        state.check_model(body.model)
        check_stream(body)
        prompts = await _encode(state, body)
        ids = [prompt.token_ids for prompt in prompts]
        return await respond(
            ENDPOINT,
            state,
            request,
            body,
            ids,
            lambda: _params(state, body, ids),
            lambda running: _Answer(state, body, prompts, running),
        )

    return routes


@dataclass(frozen=True)
class _Prompt:
    """A prompt. For `echo`: its text; with log probabilities, where its tokens begin in a text that the client gave."""

    token_ids: list[int]
    text: str = ""
    offsets: list[int] | None = None


async def _encode(state: ServerState, body: CompletionRequest) -> list[_Prompt]:
    if body.prompt is None:
        raise ApiError(400, "prompt is missing", "prompt")

    def encode() -> list[_Prompt]:
        prompts = [p for p in read_prompts(body.prompt) if not isinstance(p, ChatPrompt)]  # which JSON cannot hold
        if not prompts:
            raise ApiError(400, "prompt is an empty list; give at least one", "prompt")
        state.check_count(len(prompts))
        made = [_encode_one(state, body, prompt) for prompt in prompts]
        if not all(prompt.token_ids for prompt in made):
            raise ApiError(400, "a prompt is empty; give it at least one token", "prompt")
        return made

    with as_bad_request("prompt", only_prompt=True):
        return await in_thread_if_long(encode, _size(body.prompt))


def _encode_one(state: ServerState, body: CompletionRequest, prompt: str | list[int]) -> _Prompt:
    ids, tokenizer = state.llm.encode(prompt), state.tokenizer
    if not body.echo or tokenizer is None:
        return _Prompt(ids)
    if not isinstance(prompt, str):
        return _Prompt(ids, tokenizer.decode(ids, skip_special=body.skip_special_tokens is not False))
    return _Prompt(ids, prompt, None if body.logprobs is None else tokenizer.text_offsets(prompt))


def _size(prompt: Any) -> int:
    """Characters and token ids, nearly."""
    if isinstance(prompt, list):
        return len(prompt) + sum(len(each) for each in prompt[:THREAD_CHARS] if isinstance(each, str | list))
    return len(prompt) if isinstance(prompt, str) else 0


def _params(state: ServerState, body: CompletionRequest, ids: list[list[int]]) -> SamplingParams:
    asked = 1 if body.only_prompt else body.max_tokens
    if asked is not None and asked < 1:
        raise ApiError(400, f"max_tokens is {asked}; expected 1 or more (0 only with echo)", "max_tokens")
    defaults = state.sampling_defaults
    usual = defaults.get("max_tokens", DEFAULT_COMPLETION_TOKENS)
    max_tokens = fit_max_tokens(asked, usual, ids, state, ("prompt", "max_tokens"))
    of_prompt = body.prompt_logprobs
    if of_prompt is None and body.echo:
        of_prompt = body.logprobs
    return body.sampling_params(defaults, max_tokens=max_tokens, logprobs=body.logprobs, prompt_logprobs=of_prompt)


class _Answer:
    """The answer to one request, whole or in pieces."""

    def __init__(
        self, state: ServerState, body: CompletionRequest, prompts: list[_Prompt], running: Generation
    ) -> None:
        self._state = state
        self._body = body
        self._prompts = prompts
        self._running = running
        self._begun: set[int] = set()  # choices of which a piece was sent
        self._offsets = [TextOffsets(len(self._prompt(choice).text)) for choice in range(running.num_choices)]

    def _prompt(self, choice: int) -> _Prompt:
        return self._prompts[choice // self._running.params.n]

    async def whole(self) -> Response:
        choices = [self._whole(choice) for choice in await collect(self._running)]
        answer = ENDPOINT.head(self._state.config.served_model_name, self._running.record.id)
        return JSONResponse({**answer, "choices": choices, "usage": self._running.usage()})

    def _whole(self, choice: Choice) -> dict[str, Any]:
        made = self._choice(choice, begins=True)
        if self._body.prompt_logprobs is not None:
            made["prompt_logprobs"] = prompt_logprobs(self._running.prompt_logprobs(choice.index))
        return made

    def piece(self, output: TokenOutput) -> dict[str, Any] | None:
        begins = output.index not in self._begun
        self._begun.add(output.index)
        asked = self._body.return_token_ids or self._body.logprobs is not None
        if not (begins or output.text or output.finish_reason or asked):
            return None
        return self._choice(Choice.of(output), begins)

    def _choice(self, choice: Choice, begins: bool) -> dict[str, Any]:
        """A choice, or what new tokens add to it; where it `begins`, the prompt is in front if it is to be echoed."""
        text = (self._prompt(choice.index).text if begins else "") + choice.text
        ids = {"token_ids": choice.token_ids} if self._body.return_token_ids else {}
        logprobs = self._logprobs(choice, begins)
        return {"index": choice.index, "text": text, "logprobs": logprobs, **choice.ending, **ids}

    def _logprobs(self, choice: Choice, begins: bool) -> dict[str, Any] | None:
        if self._body.logprobs is None:
            return None
        echoed, offsets = self._echoed(choice.index) if begins and self._body.echo else ([], [])
        offsets = [*offsets, *map(self._offsets[choice.index].push, choice.scored)]
        return completion_logprobs([*echoed, *choice.scored], offsets, self._body.logprobs)

    def _echoed(self, index: int) -> tuple[list[ScoredToken], list[int]]:
        """The prompt's tokens, and where they begin; once the choice has a token."""
        prompt = self._prompt(index)
        found = self._running.prompt_logprobs(index) or [None] * len(prompt.token_ids)
        skip = self._body.skip_special_tokens is not False
        tokens = scored_prompt(self._state.tokenizer, prompt.token_ids, found, skip)
        return tokens, list(map(TextOffsets().push, tokens)) if prompt.offsets is None else prompt.offsets
