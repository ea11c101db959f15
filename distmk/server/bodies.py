"""The JSON bodies of requests: their parameters, OpenAI's and vLLM's beside them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from distmk import ChatPrompt, SamplingParams, StructuredOutputsParams
from distmk.api.absent_arguments import REQUEST
from distmk.api.answer_forms import read_response_format
from distmk.api.prompts import ChatOptions
from distmk.server.errors import ApiError, as_bad_request

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


class SamplingBody(Body):
    """What all endpoints that generate have. `SamplingParams` checks the ranges."""

    model: str
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: Strict | None = None
    min_p: Number | None = None
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
    thinking_token_budget: Strict | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: Any = None  # vLLM's names before structured_outputs
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    stream: Flag = False

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
        raise NotImplementedError

    @property
    def names(self) -> Mapping[str, str]:
        """See `as_bad_request`."""
        return {"prompt": "prompt", "structured_outputs": next(iter(self.form_names), "tools")}

    @property
    def formats(self) -> Mapping[str, Any]:
        """OpenAI's formats of an answer, by the parameter's name."""
        return {}

    @property
    def form_names(self) -> list[str]:
        """The parameters that say what form the answer has."""
        formats = [name for name, value in self.formats.items() if value not in (None, {"type": "text"})]
        return [name for name in _FORMS if getattr(self, name) is not None] + formats

    @property
    def form(self) -> StructuredOutputsParams | None:
        """The form that the answer is to have; None: any. ApiError: it is wrong, or there are two."""
        names = self.form_names
        if len(names) > 1:
            raise ApiError(400, f"{' and '.join(names)} say two forms of the answer; give one of them", names[0])
        for name in names:
            with as_bad_request({"prompt": name, "structured_outputs": name}):
                if name in self.formats:
                    return read_response_format(self.formats[name], name)
                if name == "structured_outputs":
                    return StructuredOutputsParams.of_mapping(self.structured_outputs or {})
                given = {name.removeprefix("guided_"): getattr(self, name)}
                return StructuredOutputsParams(**given, whitespace_pattern=self.guided_whitespace_pattern)
        return None

    def check_stream(self) -> None:
        """ApiError: parameters that go only with a stream, or only without one."""

    def sampling_params(self, defaults: Mapping[str, Any], **fields: Any) -> SamplingParams:
        """The parameters given, `fields`, and the model's `defaults` for others. ApiError: a value out of range."""
        given = {name: getattr(self, name, None) for name in _SAMPLING} | fields
        given.setdefault("structured_outputs", self.form)
        with as_bad_request(self.names):
            return SamplingParams(**{**defaults, **{name: value for name, value in given.items() if value is not None}})


_FORMS = ("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")
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
    "thinking_token_budget",
)


class GenerationBody(SamplingBody):
    """What /v1/completions and /v1/chat/completions have."""

    max_tokens: Strict | None = None
    n: Strict | None = None
    response_format: Any = None
    stream_options: StreamOptions | None = None
    prompt_logprobs: Strict | None = None  # vLLM's: the number of top log probabilities at every position of the prompt
    return_token_ids: Flag = False  # vLLM's: the ids beside the text

    @property
    def num_tokens_asked(self) -> int | None:
        return self.max_tokens

    @property
    def formats(self) -> Mapping[str, Any]:
        return {"response_format": self.response_format}

    def check_stream(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options needs stream: true", "stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise ApiError(400, "prompt_logprobs does not go with stream: true", "prompt_logprobs")

    @property
    def options(self) -> StreamOptions:
        return self.stream_options or StreamOptions()


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
        return {**super().names, "prompt": "messages", "logprobs": "top_logprobs", "max_tokens": max_tokens}


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
