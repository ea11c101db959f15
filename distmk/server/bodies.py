"""The JSON bodies of requests: their parameters (OpenAI's, and vLLM's beside them), and how they are read.

JSON is read, and bounded, in little time whatever a client sends, as the event loop waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from typing import Annotated, Any

from fastapi import Request as HttpRequest
from fastapi.routing import APIRoute
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import from_json
from starlette.responses import Response

from distmk import ChatPrompt, SamplingParams
from distmk.api.absent_arguments import REQUEST
from distmk.api.prompts import ChatOptions
from distmk.server.errors import ApiError, as_bad_request
from distmk.server.state import ServerState

_BYTES_PER_TOKEN = 64  # about 4 as text, 8 as a number, 12 to 24 as text in escapes; and some prompts at once
_LEAST_BYTES, _MOST_BYTES = 2 << 20, 32 << 20
_MAX_VALUES = 1 << 20  # so many numbers take 20 ms to read
_MAX_NESTED = 1 << 16  # so many objects take 20 ms
_MAX_NAMES = 1 << 17  # so many take 50 ms if no two are the same
_MAX_PARAMETERS = 256
_MAX_ITEMS = 1024  # of a parameter that is a list or an object
_IN_CONTEXT = ("messages", "tokens")  # each item has a token at least
_ANY_LENGTH = ("prompt",)  # which is checked outside of the event loop
_CHOICES = {"tool_choice": "tools", "function_call": "functions"}  # "none" of the one leaves out the other
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's, of /v1/completions


def _a_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class Body(BaseModel):
    """Unknown parameters are refused; null stands for a parameter's default."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _leave_out_neutral_values(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        unasked = {listed for choice, listed in _CHOICES.items() if body.get(choice) == "none"}
        return {name: value for name, value in body.items() if not (name in unasked or cls._asks_nothing(name, value))}

    @classmethod
    def _asks_nothing(cls, name: Any, value: Any) -> bool:
        is_absent = name in REQUEST and name not in cls.model_fields
        return value is None or (is_absent and REQUEST[name].takes(value))


class StreamOptions(Body):
    include_usage: bool = False
    continuous_usage_stats: bool = False  # vLLM's: usage with every piece


Strict = Annotated[int, Field(strict=True)]
Number = Annotated[float, Field(strict=True)]
Flag = Annotated[bool, Field(strict=True)]


class GenerationBody(Body):
    """What both endpoints that generate have. `SamplingParams` checks their ranges."""

    model: str
    max_tokens: Strict | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: Strict | None = None
    min_p: Number | None = None
    n: Strict | None = None
    seed: Strict | None = None
    stop: Annotated[Annotated[list[str], Field(fail_fast=True)] | None, BeforeValidator(_a_list)] = None
    stop_token_ids: Annotated[list[Strict], Field(fail_fast=True)] | None = None
    include_stop_str_in_output: Flag | None = None
    skip_special_tokens: Flag | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    repetition_penalty: Number | None = None
    logit_bias: dict[int, Number] | None = None
    min_tokens: Strict | None = None
    ignore_eos: Flag | None = None
    stream: Flag = False
    stream_options: StreamOptions | None = None
    prompt_logprobs: Strict | None = None  # vLLM's: the number of top log probabilities at every position of the prompt
    return_token_ids: Flag = False  # vLLM's: the ids beside the text

    @property
    def only_prompt(self) -> bool:
        """Whether nothing is to be generated."""
        return False

    @property
    def prompts(self) -> Any:
        """What `AsyncLLM.submit` takes."""
        raise NotImplementedError

    @property
    def num_prompts(self) -> int:
        return 1

    @property
    def num_tokens_asked(self) -> int | None:
        """The tokens of a completion, if the client says."""
        return self.max_tokens

    @property
    def names(self) -> Mapping[str, str]:
        """See `as_bad_request`."""
        return {"prompt": "prompt"}

    @property
    def options(self) -> StreamOptions:
        return self.stream_options or StreamOptions()

    def sampling_params(self, defaults: Mapping[str, Any], **fields: Any) -> SamplingParams:
        """The parameters given, `fields`, and the model's `defaults` for others. ApiError: a value out of range."""
        given = {name: getattr(self, name) for name in _SAMPLING} | fields
        with as_bad_request(self.names):
            return SamplingParams(**{**defaults, **{name: value for name, value in given.items() if value is not None}})


_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "n",
    "seed",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "min_tokens",
    "ignore_eos",
)


class CompletionBody(GenerationBody):
    """/v1/completions. `prompt`: text, token ids, or a list of either."""

    prompt: Any = None
    echo: Flag = False
    logprobs: Strict | None = None  # the number of top log probabilities beside the chosen token's

    @property
    def only_prompt(self) -> bool:
        return self.echo and self.max_tokens == 0

    @property
    def prompts(self) -> Any:
        if self.prompt is None:
            raise ApiError(400, "prompt is missing", "prompt")
        begins = self.prompt[0] if isinstance(self.prompt, list) and self.prompt else None
        return [self.prompt] if isinstance(begins, int | float) else self.prompt

    @property
    def num_prompts(self) -> int:
        prompts = None if self.prompt is None else self.prompts
        return max(1, len(prompts)) if isinstance(prompts, list) else 1

    @property
    def num_tokens_asked(self) -> int | None:
        return 1 if self.only_prompt else self.max_tokens


Messages = Annotated[list[dict[str, Any]], Field(fail_fast=True)]
"""Messages of a chat, or tools, which the engine checks and its chat template reads."""


class _RenderingBody(Body):
    """vLLM's parameters that say how messages become a prompt, as in `ChatOptions`."""

    add_generation_prompt: Flag = True
    continue_final_message: Flag = False
    chat_template: str | None = None  # only if the server trusts its clients' templates
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Messages | None = None

    @property
    def chat_options(self) -> ChatOptions:
        return {
            "add_generation_prompt": self.add_generation_prompt,
            "continue_final_message": self.continue_final_message,
            "chat_template": self.chat_template,
            "chat_template_kwargs": self.chat_template_kwargs,
            "tools": self.tools or None,
        }


class ChatCompletionBody(GenerationBody, _RenderingBody):
    """/v1/chat/completions."""

    messages: Messages
    max_completion_tokens: Strict | None = None
    logprobs: Flag = False
    top_logprobs: Strict | None = None
    tool_choice: Any = None
    parallel_tool_calls: Flag = True
    include_reasoning: Flag = True  # vLLM's

    @property
    def prompts(self) -> list[ChatPrompt]:
        return [ChatPrompt(self.messages, **self.chat_options)]

    @property
    def num_tokens_asked(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def names(self) -> Mapping[str, str]:
        max_tokens = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        return {"prompt": "messages", "logprobs": "top_logprobs", "max_tokens": max_tokens}


class TokenizeBody(_RenderingBody):
    """vLLM's /tokenize: a prompt, or the messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    return_token_strs: Flag = False


class DetokenizeBody(Body):
    """vLLM's /detokenize."""

    model: str | None = None
    tokens: Annotated[list[Strict], Field(fail_fast=True)]


def fitting_body_bytes(max_model_len: int) -> int:
    """The most bytes of a body for a model with a context of `max_model_len` tokens."""
    return min(max(_LEAST_BYTES, _BYTES_PER_TOKEN * max_model_len), _MOST_BYTES)


def bounded_route(state: ServerState) -> type[APIRoute]:
    """The route class for one server: it reads bodies with the bounds of this module."""

    class BoundedRequest(HttpRequest):
        async def json(self) -> Any:
            if not hasattr(self, "_json"):
                self._json = read_json(await self.body(), state.llm.max_model_len)
            return self._json

    class BoundedRoute(APIRoute):
        def get_route_handler(self) -> Callable[[HttpRequest], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()

            async def bounded(request: HttpRequest) -> Response:
                return await handle(BoundedRequest(request.scope, request.receive))

            return bounded

    return BoundedRoute


def read_json(body: bytes, max_model_len: int) -> Any:
    """The value that `body` is, none of whose parameters is too long to be checked item by item.

    ApiError: it is not JSON, or too large in one of its parts.
    """
    # Text may have these characters too; a text with so many has more tokens than the context.
    max_values, max_nested = max(_MAX_VALUES, 4 * max_model_len), max(_MAX_NESTED, max_model_len // 4)
    if body.count(b",") > max_values:
        raise ApiError(400, f"the body has more than {max_values} values; send fewer in one request")
    max_names = max(_MAX_NAMES, max_model_len)
    if body.count(b":") > max_names:
        raise ApiError(400, f"the body has more than {max_names} names; send fewer in one request")
    if body.count(b"[") + body.count(b"{") > max_nested:
        raise ApiError(400, f"the body has more than {max_nested} lists and objects; send fewer in one request")
    try:
        # It takes a third of the time of `json` in bad cases, and refuses deep nesting. A cache of strings doubles the time
        # of names that all differ.
        value = from_json(body, cache_strings="none")
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None
    if isinstance(value, dict):
        _check_sizes(value, max_model_len)
    return value


def _check_sizes(body: dict[str, Any], max_model_len: int) -> None:
    if len(body) > _MAX_PARAMETERS:
        raise ApiError(400, f"the body has {len(body)} parameters; at most {_MAX_PARAMETERS} can be given")
    for name, value in body.items():
        if not isinstance(value, list | dict) or name in _ANY_LENGTH:
            continue
        most = max_model_len if name in _IN_CONTEXT else _MAX_ITEMS
        if len(value) > most:
            raise ApiError(400, f"{name[:60]} has {len(value)} entries; at most {most} can be given", name[:60])
