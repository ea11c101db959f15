"""The JSON body of /v1/responses: OpenAI's parameters, and vLLM's beside them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distmk import ChatPrompt
from distmk.api.absent_arguments import REQUEST
from distmk.errors import shown
from distmk.server.bodies import Body, Flag, Messages, SamplingBody, Strict
from distmk.server.errors import ApiError
from distmk.server.responses_input import read_input, read_tools

_LOGPROBS = "message.output_text.logprobs"
_INCLUDED = (_LOGPROBS, "reasoning.encrypted_content")  # reasoning is sent as it is, and taken back so


class ReasoningOptions(Body):
    effort: Any = None
    summary: Any = None  # reasoning is shown whole


class TextOptions(Body):
    format: Any = None


class EventOptions(Body):
    """OpenAI's padding of events (`include_obfuscation`) has no effect."""


class ResponsesBody(SamplingBody):
    """/v1/responses. Nothing is stored: `input` has the whole conversation."""

    input: Any  # text, or items
    instructions: str | None = None
    max_output_tokens: Strict | None = None
    top_logprobs: Strict | None = None
    include: list[Any] | None = None
    metadata: dict[str, Any] | None = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    tools: Messages | None = None
    tool_choice: Any = None
    parallel_tool_calls: Flag = True
    chat_template_kwargs: dict[str, Any] | None = None  # vLLM's
    stream_options: EventOptions | None = None

    @property
    def prompts(self) -> list[ChatPrompt]:
        messages = read_input(self.input, self.instructions)
        kwargs = self.chat_template_kwargs
        return [ChatPrompt(messages, chat_template_kwargs=kwargs, tools=read_tools(self.tools))]

    @property
    def num_tokens_asked(self) -> int | None:
        return self.max_output_tokens

    @property
    def num_logprobs(self) -> int | None:
        """The number of top log probabilities beside those of the tokens; None: none are asked for."""
        return (self.top_logprobs or 0) if _LOGPROBS in (self.include or ()) or self.top_logprobs else None

    @property
    def names(self) -> Mapping[str, str]:
        return {**super().names, "prompt": "input", "logprobs": "top_logprobs", "max_tokens": "max_output_tokens"}

    @property
    def formats(self) -> Mapping[str, Any]:
        return {"text.format": self.text and self.text.format}

    def check(self) -> None:
        """ApiError: it asks for what this server does not have."""
        if self.max_output_tokens is not None and self.max_output_tokens < 1:
            message = f"max_output_tokens is {self.max_output_tokens}; expected 1 or more"
            raise ApiError(400, message, "max_output_tokens")
        for each in self.include or ():
            if each not in _INCLUDED:
                message = f"include has {shown(each)}; expected {' or '.join(_INCLUDED)}"
                raise ApiError(400, message, "include")
        _refuse(self.reasoning and self.reasoning.effort, "reasoning.effort", "reasoning_effort")


def _refuse(value: Any, name: str, absent: str) -> None:
    """ApiError: `value` of the parameter `name` asks for something; it stands for the parameter `absent` of chats."""
    if not REQUEST[absent].takes(value):
        message = f"{name} is {shown(value)}, which distmk does not support; {REQUEST[absent].instead}"
        raise ApiError(400, message, name)
