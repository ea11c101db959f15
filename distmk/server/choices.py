"""The choices of an answer, as their tokens come: what both endpoints that generate have in common."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from distmk.server.answers import event
from distmk.server.errors import ApiError
from distmk.server.generation import Generation
from distmk.server.logprobs import TokenLogprobs
from distmk.server.requests import Generating, StreamOptions
from distmk.serving.sampling import TokenOutput


@dataclass
class Choice:
    """One choice so far."""

    index: int
    texts: list[str] = field(default_factory=list)
    tokens: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None

    def add(self, output: TokenOutput) -> None:
        self.texts.append(output.text)
        if output.finish_reason != "abort":
            self.tokens.append((output.token_id, output.logprobs))
        self.finish_reason = output.finish_reason

    @property
    def text(self) -> str:
        return "".join(self.texts)


def head(kind: str, prefix: str, model: str) -> dict[str, Any]:
    """What every answer and every piece of one begins with."""
    return {"id": f"{prefix}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": model}


def check_stream(body: Generating) -> None:
    """ApiError: parameters that go only with a stream, or only without one."""
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream: true", "stream_options")
    if body.prompt_logprobs is not None and body.stream:
        raise ApiError(400, "prompt_logprobs does not go with stream: true", "prompt_logprobs")


async def collect(running: Generation) -> list[Choice]:
    """All choices, whole. DistmkError: the engine has ended."""
    choices = [Choice(index) for index in range(running.num_choices)]
    async for outputs in running.outputs():
        for output in outputs:
            choices[output.index].add(output)
    return choices


async def events(
    running: Generation,
    beginning: dict[str, Any],
    piece: Callable[[TokenOutput], dict[str, Any] | None],
    options: StreamOptions,
) -> AsyncIterator[str]:
    """The events of a stream: one for each token that `piece` shows anything of, as a choice, then the usage."""

    def one(choices: list[dict[str, Any]], usage: dict[str, int] | None) -> str:
        more = {"usage": usage} if options.include_usage or options.continuous_usage_stats else {}
        return event({**beginning, "choices": choices, **more})

    async for outputs in running.outputs():
        usage = running.usage() if options.continuous_usage_stats else None
        shown = [choice for output in outputs if (choice := piece(output)) is not None]
        if shown:
            yield "".join(one([choice], usage) for choice in shown)
    if options.include_usage:
        yield one([], running.usage())
