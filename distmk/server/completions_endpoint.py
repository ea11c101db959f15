"""/v1/completions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse
from starlette.responses import Response

from distmk import SamplingParams, TokenOutput
from distmk.api.token_stream import in_thread_if_long, text_size
from distmk.server.bodies import DEFAULT_COMPLETION_TOKENS, CompletionBody
from distmk.server.body_reader import bounded_route
from distmk.server.errors import ApiError
from distmk.server.generation import Choice, Generation, collect
from distmk.server.openai_logprobs import ScoredToken, TextOffsets, completion_logprobs, prompt_logprobs, scored_prompt
from distmk.server.respond import ChoicesAnswer, Endpoint, respond
from distmk.server.state import ServerState

ENDPOINT = Endpoint("text_completion", "text_completion", "cmpl")


def router(state: ServerState) -> APIRouter:
    """The route, for one server."""
    routes = APIRouter(route_class=bounded_route(state))

    @routes.post("/v1/completions", response_model=None)
    async def create(body: CompletionBody, http: HttpRequest) -> Response:
        async def make_answer(running: Generation) -> _Answer:
            return _Answer(state, body, await _make_echoes(state, body, running.prompts), running)

        return await respond(state, http, body, _params(state, body), make_answer)

    return routes


def _params(state: ServerState, body: CompletionBody) -> SamplingParams:
    asked = body.num_tokens_asked
    if asked is not None and asked < 1:
        raise ApiError(400, f"max_tokens is {asked}; expected 1 or more (0 only with echo)", "max_tokens")
    of_prompt = body.prompt_logprobs
    if of_prompt is None and body.echo:
        of_prompt = body.logprobs
    defaults = {"max_tokens": DEFAULT_COMPLETION_TOKENS, **state.llm.sampling_defaults}
    return body.sampling_params(defaults, max_tokens=asked, logprobs=body.logprobs, prompt_logprobs=of_prompt)


@dataclass(frozen=True)
class _Echo:
    """A prompt as the answer repeats it: its text, and the offsets of its tokens if the client gave text and asks for log
    probabilities.
    """

    text: str = ""
    offsets: list[int] | None = None


async def _make_echoes(state: ServerState, body: CompletionBody, prompts: list[list[int]]) -> list[_Echo]:
    """An echo of each prompt, which is empty if the client asks for none."""
    tokenizer = state.llm.tokenizer
    if not body.echo or tokenizer is None:
        return [_Echo() for _ in prompts]

    def make(given: Any, ids: list[int]) -> _Echo:
        if not isinstance(given, str):
            return _Echo(tokenizer.decode(ids, skip_special=body.skip_special_tokens is not False))
        return _Echo(given, None if body.logprobs is None else tokenizer.text_offsets(given))

    given = body.prompts if isinstance(body.prompts, list) else [body.prompts]
    size = text_size(given) + sum(map(len, prompts))
    return await in_thread_if_long(lambda: list(map(make, given, prompts)), size)


class _Answer(ChoicesAnswer):
    def __init__(self, state: ServerState, body: CompletionBody, echoes: list[_Echo], running: Generation) -> None:
        super().__init__(ENDPOINT, state.config.served_model_name, running, body.options)
        self._state = state
        self._body = body
        self._echoes = echoes
        self._begun: set[int] = set()  # choices of which a piece was sent
        self._offsets = [TextOffsets(len(self._echo(choice).text)) for choice in range(running.num_choices)]

    def _echo(self, choice: int) -> _Echo:
        return self._echoes[choice // self._running.params.n]

    async def whole(self) -> Response:
        choices = [self._whole(choice) for choice in await collect(self._running)]
        return JSONResponse({**self.head(), "choices": choices, "usage": self._running.usage()})

    def _whole(self, choice: Choice) -> dict[str, Any]:
        made = self._choice(choice, begins=True)
        if self._body.prompt_logprobs is not None:
            made["prompt_logprobs"] = prompt_logprobs(self._running.prompt_logprobs(choice.index))
        return made

    def pieces(self, output: TokenOutput) -> list[dict[str, Any]]:
        begins = output.index not in self._begun
        self._begun.add(output.index)
        asked = self._body.return_token_ids or self._body.logprobs is not None
        if not (begins or output.text or output.finish_reason or asked):
            return []
        return [self._choice(Choice.of(output), begins)]

    def _choice(self, choice: Choice, begins: bool) -> dict[str, Any]:
        """A choice, or what new tokens add to it; where it `begins`, the prompt is in front if it is to be echoed."""
        text = (self._echo(choice.index).text if begins else "") + choice.text
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
        echo, ids = self._echo(index), self._running.prompts[index // self._running.params.n]
        found = self._running.prompt_logprobs(index) or [None] * len(ids)
        skip = self._body.skip_special_tokens is not False
        tokens = scored_prompt(self._state.llm.tokenizer, ids, found, skip)
        return tokens, list(map(TextOffsets().push, tokens)) if echo.offsets is None else echo.offsets
