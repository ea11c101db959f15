"""Conversations as token ids, through the chat template of a model."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from distmk.errors import UsageError, shown
from distmk.text.chat import template_processes
from distmk.text.chat.files import ChatFiles, check_template_size, read_chat_files
from distmk.text.chat.messages import ChatPrompt, read_messages
from distmk.text.chat.plain_values import plain
from distmk.text.chat.tools import read_tools
from distmk.text.processes.frames import Outcome
from distmk.text.tokenizer import EncodedPrompt, Tokenizer
from distmk.weights.checkpoint import ModelFiles

_OWN_VARIABLES = ("messages", "add_generation_prompt")
_TAG = "CONTINUE_FINAL_MESSAGE_TAG "


class ChatRenderer:
    """Renders conversations for one model. Any number of threads may call it. Files are read at the first use.

    `max_model_len`: a context, for which text that is too long in any case is refused before it is encoded.
    """

    def __init__(self, checkpoint: ModelFiles, tokenizer: Tokenizer, max_model_len: int | None = None) -> None:
        self._checkpoint = checkpoint
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len

    @functools.cached_property
    def files(self) -> ChatFiles:
        """The model's templates. ModelError: its files are damaged."""
        return read_chat_files(self._checkpoint, self._tokenizer)

    @property
    def has_template(self) -> bool:
        return bool(self.files.templates)

    @property
    def template_text(self) -> str:
        """The templates that conversations with and without tools are rendered by, as one text that shows their format."""
        templates = self.files.templates
        return "\n".join(templates[name] for name in ("default", "tool_use") if name in templates)

    def render(self, prompt: ChatPrompt) -> EncodedPrompt:
        """The text and ids of a conversation as transformers' `apply_chat_template` makes them.

        The template writes all special tokens, BOS among them, so the tokenizer adds none. UsageError: the messages, the options
        or the template are wrong, or the template refuses the conversation.
        """
        text = self.render_text(prompt)
        ids = self._tokenizer.encode(text, add_special=False, max_tokens=self._max_model_len)
        return EncodedPrompt(ids, text)

    def render_text(self, prompt: ChatPrompt) -> str:
        """As `render`, the text alone."""
        messages = read_messages(prompt.messages)
        variables = self._read_variables(prompt)
        name, source = self._choose(prompt.chat_template, bool(variables.get("tools")))
        if not prompt.continue_final_message:
            return _render(name, source, messages, variables)
        last = _mark_end(messages, prompt.add_generation_prompt)
        return _cut_at_mark(_render(name, source, messages, variables), last, name)

    def _read_variables(self, prompt: ChatPrompt) -> dict[str, Any]:
        """The variables of a template but for the messages."""
        given = prompt.chat_template_kwargs
        if given is not None and not isinstance(given, Mapping):
            raise UsageError(f"chat_template_kwargs is {shown(given)}; expected a dict of variables of the template")
        extra: dict[str, Any] = plain(given or {}, "chat_template_kwargs")
        if own := [name for name in _OWN_VARIABLES if name in extra]:
            raise UsageError(f"chat_template_kwargs has {own[0]!r}, which is a parameter of its own")
        for name, flag in (
            ("add_generation_prompt", prompt.add_generation_prompt),
            ("continue_final_message", prompt.continue_final_message),
        ):
            if not isinstance(flag, bool):
                raise UsageError(f"{name} is {shown(flag)}; expected True or False")
        own_values = {"tools": None, "documents": None, "add_generation_prompt": prompt.add_generation_prompt}
        tools = {"tools": read_tools(prompt.tools)} if prompt.tools else {}
        return {**self.files.special_tokens, **own_values, **extra, **tools}

    def _choose(self, given: str | None, has_tools: bool) -> tuple[str, str]:
        """The name, for messages, and the source of a template: the one given by name or as text, or the model's."""
        files = self.files
        if given is not None:
            if not isinstance(given, str):
                raise UsageError(
                    f"chat_template is {shown(given)}; expected the text of a template, or the name of one"
                )
            if given in files.templates:
                return f"the chat template {given!r} of {files.where}", files.templates[given]
            return "the given chat template", check_template_size(given, "the given chat template")
        if not files.templates:
            raise UsageError(
                f"{files.where}: has no chat template, as base models have none; give one as chat_template, or a prompt as text"
            )
        for name in ("tool_use", "default") if has_tools else ("default",):
            if name in files.templates:
                return f"the chat template of {files.where}", files.templates[name]
        names = ", ".join(map(repr, sorted(files.templates)))
        raise UsageError(
            f"{files.where}: none of its chat templates is the default; choose one as chat_template: {names}"
        )


def _render(name: str, source: str, messages: list[dict[str, Any]], variables: dict[str, Any]) -> str:
    answer = template_processes.render(source, messages, variables)
    match answer.outcome:
        case Outcome.TEXT:
            return answer.text
        case Outcome.INVALID:
            raise UsageError(f"{name} is not valid{answer.text}")
        case Outcome.REFUSED:
            raise UsageError(f"{name} refuses the conversation: {answer.text}")
        case Outcome.STOPPED:
            raise UsageError(f"{name} was stopped: {answer.text}; give another one as chat_template")
        case Outcome.MISFIT:
            raise UsageError(f"{name} does not fit the conversation: {answer.text}")


def _mark_end(messages: list[dict[str, Any]], add_generation_prompt: bool) -> str:
    """Put a mark behind the last message, by which its end is found in the rendered text. Returns the text before the mark."""
    if add_generation_prompt:
        raise UsageError(
            "continue_final_message needs add_generation_prompt=False: the last message is not to be ended"
        )
    content = messages[-1].get("content")
    if isinstance(content, str):
        messages[-1]["content"] = content + _TAG
        return content
    if not content:
        raise UsageError("continue_final_message: the last message has no text to continue")
    last: str = content[-1]["text"]
    content[-1]["text"] = last + _TAG
    return last


def _cut_at_mark(text: str, last: str, name: str) -> str:
    end = text.rfind(_TAG.rstrip())
    if end < 0 or last.strip() not in text:
        raise UsageError(f"{name} does not show the whole last message, so it cannot be continued")
    # A template that strips messages has stripped the mark's space, and would have stripped the message's own.
    return text[:end] if text[end:].startswith(_TAG) else text[:end].rstrip()
