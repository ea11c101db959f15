"""Conversations as users give them (OpenAI's messages, with the types of Python's JSON), checked and made plain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypedDict

from distmk.errors import UsageError, shown
from distmk.text.chat.plain_values import dumped, is_list, plain, value_name
from distmk.text.chat.tool_calls import read_function, read_tool_calls

ROLES = ("system", "developer", "user", "assistant", "tool")

MAX_MESSAGES = 100_000
_REASONING = (
    "reasoning_content",
    "thinking",
    "reasoning",
)  # names of one field; templates read the first, some the second

_EXPECTED = 'expected {"role": one of ' + ", ".join(ROLES) + ', "content": text}'

Message = Mapping[str, Any]
Conversation = Sequence[Message]


class ChatOptions(TypedDict, total=False):
    """Options of `LLM.chat`, named as in vLLM.

    `add_generation_prompt`: end the prompt with the beginning of the assistant's answer (the default).
    `continue_final_message`: leave the last message open, so that the answer goes on with it.
    `chat_template`: a template, or the name of one of the model's, in place of its default one.
    `chat_template_kwargs`: further variables of the template, such as enable_thinking.
    `tools`: functions that the model may call, as in OpenAI's API, for the template to describe.
    """

    add_generation_prompt: bool
    continue_final_message: bool
    chat_template: str | None
    chat_template_kwargs: Mapping[str, Any] | None
    tools: Sequence[Mapping[str, Any]] | None


@dataclass(frozen=True)
class ChatPrompt:
    """Conversations as prompts, with `ChatOptions`; `messages` are one conversation or a list of them."""

    messages: Conversation | Sequence[Conversation]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None
    tools: Sequence[Mapping[str, Any]] | None = None

    def split(self) -> list[ChatPrompt]:
        """One for each conversation. UsageError: the messages are no list."""
        if not is_list(self.messages):
            raise UsageError(
                f"the messages are {value_name(self.messages)}; expected a list of messages, or a list of such lists"
            )
        given: Sequence[Any] = self.messages
        return [replace(self, messages=each) for each in given] if given and is_list(given[0]) else [self]


def chat_prompt(messages: Any, options: Mapping[str, Any]) -> ChatPrompt:
    """A ChatPrompt with options by name. UsageError: one has no such name."""
    known = [field.name for field in fields(ChatPrompt)][1:]
    for name in options:
        if name not in known:
            raise UsageError(f"{name!r} is no option of a conversation; expected {', '.join(known)}")
    return ChatPrompt(messages, **options)


def read_messages(given: Any) -> list[dict[str, Any]]:
    """One conversation, as new plain objects; keys whose value is None are left out, as in transformers.

    The content of each is text, or a list of text parts; beside tool calls it may be absent. Arguments of tool calls are
    objects. UsageError: anything else; the line names the message and the expected form.
    """
    if not is_list(given):
        raise UsageError(f"the conversation is {value_name(given)}; expected a list of messages")
    if not given:
        raise UsageError("the conversation has no messages; give at least one")
    if len(given) > MAX_MESSAGES:
        raise UsageError(f"the conversation has {len(given)} messages; at most {MAX_MESSAGES} are taken")
    return [_read_message(message, f"message {index}") for index, message in enumerate(given)]


def joined_text(content: str | list[dict[str, Any]]) -> str:
    """Content as one text: parts are lines, as in vLLM."""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def _read_message(given: Any, what: str) -> dict[str, Any]:
    given = dumped(given)
    if not isinstance(given, Mapping):
        raise UsageError(f"{what} is {value_name(given)}; {_EXPECTED}")
    message = {key: value for key, value in plain(given, what).items() if value is not None}
    role = message.get("role")
    if role not in ROLES:
        wrong = f"has the role {shown(role)}" if "role" in message else "has no role"
        raise UsageError(f"{what} {wrong}; {_EXPECTED}")
    if role == "assistant":
        message = _with_calls(message, what)
    if "content" in message:
        message["content"] = _read_content(message["content"], what)
    elif role != "assistant" or not ("tool_calls" in message or "function_call" in message):
        raise UsageError(f"{what} has no content; {_EXPECTED}")
    reasoning = next((message[key] for key in _REASONING if key in message), None)
    if reasoning is not None:
        message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
    return message


def _with_calls(message: dict[str, Any], what: str) -> dict[str, Any]:
    """The message with its tool calls, or the function call of older clients, as templates read them; an empty list is none."""
    if "tool_calls" in message:
        message["tool_calls"] = read_tool_calls(message["tool_calls"], what)
        if not message["tool_calls"]:
            del message["tool_calls"]
    if "function_call" in message:
        message["function_call"] = read_function(message["function_call"], f"the function_call of {what}")
    return message


def _read_content(content: Any, what: str) -> Any:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise UsageError(
            f'the content of {what} is {value_name(content)}; expected text, or a list of {{"type": "text"}} parts'
        )
    for index, part in enumerate(content):
        if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
            continue
        kind = part.get("type") if isinstance(part, dict) else part
        raise UsageError(
            f"part {index} of the content of {what} is {shown(kind)}; "
            'this model takes text: expected {"type": "text", "text": ...}'
        )
    return content
