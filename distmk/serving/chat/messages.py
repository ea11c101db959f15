"""Conversations as users give them (OpenAI's messages, with the types of Python's JSON), checked and made plain."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypedDict

from distmk.errors import UsageError, shown

ROLES = ("system", "developer", "user", "assistant", "tool")

MAX_MESSAGES = 100_000
_MAX_DEPTH = 64
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
    """

    add_generation_prompt: bool
    continue_final_message: bool
    chat_template: str | None
    chat_template_kwargs: Mapping[str, Any] | None


@dataclass(frozen=True)
class ChatPrompt:
    """Conversations as prompts, with `ChatOptions`; `messages` are one conversation or a list of them."""

    messages: Conversation | Sequence[Conversation]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None

    def split(self) -> list[ChatPrompt]:
        """One for each conversation. UsageError: the messages are no list."""
        if not _is_list(self.messages):
            raise UsageError(
                f"the messages are {_name(self.messages)}; expected a list of messages, or a list of such lists"
            )
        given: Sequence[Any] = self.messages
        return [replace(self, messages=each) for each in given] if given and _is_list(given[0]) else [self]


def chat_prompt(messages: Any, options: Mapping[str, Any]) -> ChatPrompt:
    """A ChatPrompt with options by name. UsageError: one has no such name."""
    known = [field.name for field in fields(ChatPrompt)][1:]
    for name in options:
        if name not in known:
            raise UsageError(f"{name!r} is no option of a conversation; expected {', '.join(known)}")
    return ChatPrompt(messages, **options)


def read_messages(given: Any) -> list[dict[str, Any]]:
    """One conversation, as new plain objects; keys whose value is None are left out, as in transformers.

    The content of each is text, or a list of text parts. UsageError: anything else; it names the message and what was expected.
    """
    if not _is_list(given):
        raise UsageError(f"the conversation is {_name(given)}; expected a list of messages")
    if not given:
        raise UsageError("the conversation has no messages; give at least one")
    if len(given) > MAX_MESSAGES:
        raise UsageError(f"the conversation has {len(given)} messages; at most {MAX_MESSAGES} are taken")
    return [_read_message(message, f"message {index}") for index, message in enumerate(given)]


def joined_text(content: str | list[dict[str, Any]]) -> str:
    """Content as one text: parts are lines, as in vLLM."""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def plain(value: Any, what: str, depth: int = 0) -> Any:
    """A copy of a JSON value in Python's own types, without methods that a template could misuse. UsageError: it is none."""
    if depth > _MAX_DEPTH:
        raise UsageError(f"{what} is nested more than {_MAX_DEPTH} deep")
    value = _dumped(value)
    if isinstance(value, str):
        return str.__str__(value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise UsageError(f"{what} has the key {shown(key)}; keys are text")
        return {str(key): plain(item, f"{what}[{shown(key)}]", depth + 1) for key, item in value.items()}
    if _is_list(value):
        return [plain(item, f"{what}[{index}]", depth + 1) for index, item in enumerate(value)]
    raise UsageError(f"{what} is {_name(value)}; expected what JSON can hold: text, numbers, lists and dicts")


def _read_message(given: Any, what: str) -> dict[str, Any]:
    given = _dumped(given)
    if not isinstance(given, Mapping):
        raise UsageError(f"{what} is {_name(given)}; {_EXPECTED}")
    message = {key: value for key, value in plain(given, what).items() if value is not None}
    role = message.get("role")
    if role not in ROLES:
        wrong = f"has the role {shown(role)}" if "role" in message else "has no role"
        raise UsageError(f"{what} {wrong}; {_EXPECTED}")
    if "content" in message:
        message["content"] = _read_content(message["content"], what)
    elif role != "assistant" or "tool_calls" not in message:
        raise UsageError(f"{what} has no content; {_EXPECTED}")
    reasoning = next((message[key] for key in _REASONING if key in message), None)
    if reasoning is not None:
        message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
    return message


def _read_content(content: Any, what: str) -> Any:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise UsageError(
            f'the content of {what} is {_name(content)}; expected text, or a list of {{"type": "text"}} parts'
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


def _dumped(value: Any) -> Any:
    """Objects of the openai client and other pydantic models as dicts."""
    dump = getattr(value, "model_dump", None)
    return dump() if callable(dump) and not isinstance(value, type) else value


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray | memoryview)


def _name(value: object) -> str:
    if value is None or isinstance(value, bool | numbers.Number | str):
        return shown(value)
    kind = type(value).__name__
    return f"{'an' if kind[0].lower() in 'aeiou' else 'a'} {kind}"
