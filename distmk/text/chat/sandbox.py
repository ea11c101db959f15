"""The jinja2 environment of chat templates: it is the environment of transformers, in jinja2's sandbox.

A template is code from a model's author. The sandbox keeps it from Python's internals. The operating system limits its time
and memory (`template_worker`).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from distmk.text.chat.content import ContentForm


class RefusalError(Exception):
    """The template itself refuses a conversation: it called raise_exception."""


@dataclass(frozen=True)
class ChatTemplate:
    """A compiled template, and the form of content that it reads."""

    inner: jinja2.Template
    content: ContentForm

    def pieces(self, messages: list[dict[str, Any]], variables: dict[str, Any]) -> Iterator[str]:
        """The text of a conversation whose messages fit `content`, piece by piece.

        RefusalError; any other exception: the template does not fit the conversation.
        """
        return self.inner.generate({**variables, "messages": messages})


@functools.lru_cache(maxsize=4)
def compile_template(source: str) -> ChatTemplate:
    """Compile a template. jinja2.TemplateSyntaxError, or another exception: it is not one."""
    sandbox = Sandbox()
    tree = sandbox.parse(source)
    return ChatTemplate(sandbox.from_string(tree), ContentForm.of(tree))


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment of one template."""

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
        self.filters["tojson"] = _to_json
        self.globals.update(raise_exception=_refuse, strftime_now=_strftime_now, namespace=_Namespace)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Without the escapes of HTML that jinja2's own filter writes; parameters as in transformers."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: object) -> NoReturn:
    raise RefusalError(str(message))


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


class _Namespace(Namespace):
    """Without names that begin with an underscore, as in transformers."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, given = args[0], dict(*args[1:], **kwargs)
        for name in given:
            _check_name(name)
        Namespace.__init__(self, given)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace has no attribute {name!r}")


class _GenerationTag(Extension):
    """{% generation %} marks an assistant's reply for training; here its body stands for itself."""

    tags = {"generation"}  # noqa: RUF012 (the type that jinja2 declares)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)
