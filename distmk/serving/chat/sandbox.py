"""The jinja2 environment of chat templates: that of transformers, with bounds on time and size.

A template is code from a model's author. The sandbox keeps it from Python's internals. Time is checked in every turn of a loop
and at every call and filter, sizes wherever one value is put together from several: a template that loops for ever, or doubles
a string in a loop, ends with LimitError.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from distmk.serving.chat.content import ContentForm

MAX_RENDER_S = 2.0
"""Of the rendering thread's CPU time. A conversation of 1,000 messages takes about 10 ms."""

MAX_VALUE_CHARS = 16 << 20
"""Of a string, or items of a list, within a template, and of what it renders. A million tokens are about 4 MB of text."""

_PADDING = frozenset(
    (
        "ljust",
        "rjust",
        "center",
        "zfill",
        "expandtabs",
        "indent",
        "wordwrap",
        "batch",
        "slice",
        "lipsum",
        "generate_lorem_ipsum",
    )
)
"""Methods, filters and functions to which a number is a width, or a count of what they make."""

_MAX_NESTED = 1 << 19  # lists and values of one value, those inside its lists counted as often as they are there

_CONTAINERS = (list, tuple, dict, Namespace)

_WIDE_FORMAT = re.compile(r"%[-#0 +.*\d]*\d{5}|\{[^{}]*:[^{}]*\d{5}")

_deadline_s: ContextVar[float] = ContextVar("deadline_s", default=0.0)  # of this thread's CPU time


class LimitError(Exception):
    """A template takes too long, or makes too much."""


class RefusalError(Exception):
    """The template itself refuses a conversation: it called raise_exception."""


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    token = _deadline_s.set(time.thread_time() + MAX_RENDER_S)
    try:
        yield
    finally:
        _deadline_s.reset(token)


@dataclass(frozen=True)
class ChatTemplate:
    """A compiled template, and the form of content that it reads."""

    inner: jinja2.Template
    content: ContentForm


def render(template: ChatTemplate, variables: dict[str, Any]) -> str:
    """The text that `template` makes. LimitError, RefusalError; any other exception: the template is wrong for `variables`."""
    with _limited():
        pieces, size = [], 0
        for piece in template.inner.generate(variables):
            size += len(piece)
            if size > MAX_VALUE_CHARS:
                raise LimitError(f"it writes more than {MAX_VALUE_CHARS >> 20} MiB")
            pieces.append(piece)
        return "".join(pieces)


@functools.lru_cache(maxsize=32)
def compile_template(source: str) -> ChatTemplate:
    """Compile a template. jinja2.TemplateSyntaxError, or another exception: it is not one."""
    with _limited():  # constants are computed already
        sandbox = Sandbox()
        tree = sandbox.parse(source)
        content = ContentForm.of(tree)
        tree = _InsertChecks().visit(tree)
        tree.set_environment(sandbox)
        return ChatTemplate(sandbox.from_string(tree), content)


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment of one template."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
        self.filters["tojson"] = _to_json
        self.filters = {name: _bounded(name, filter_) for name, filter_ in self.filters.items()}
        self.globals.update(raise_exception=_refuse, strftime_now=_strftime_now, namespace=_Namespace)

    def check(self, value: Any = "") -> Any:
        """`value`, within the bounds."""
        return _check(value)

    def check_nested(self, value: Any) -> Any:
        """`value`, within the bounds."""
        _check_nested(value)
        return value

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        _check_widths(getattr(__obj, "__name__", ""), args, kwargs)
        if len(given := [value for value in (*args, *kwargs.values()) if isinstance(value, _CONTAINERS)]) > 1:
            _check_nested(given)  # which the function may put into one value
        return _check(super().call(__context, __obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _check_format(value.__self__)
        return wrapped

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and not (abs(left) <= 1 << 32 and abs(right) <= 64):
            raise LimitError("it raises a number to a large power")
        if operator == "*":
            _check_product(left, right)
        if operator == "%" and isinstance(left, str):
            _check_format(left)
        value = _check(super().call_binop(context, operator, left, right))
        if isinstance(value, _CONTAINERS):
            _check_nested(value)
        return value


class _InsertChecks(NodeTransformer):
    """Checks the time in every turn of every loop, and the size of what lists, dicts, `~` and {% set %} blocks put together."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_call("check", node.lineno), lineno=node.lineno))
        return node

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> nodes.Node:
        self.generic_visit(node)
        node.filter = nodes.Filter(node.filter, "string", [], [], None, None, lineno=node.lineno)  # is checked
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call("check", node.lineno, node)

    def visit_List(self, node: nodes.List | nodes.Dict | nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        varying = [item for item in node.items if not isinstance(item, nodes.Const)]
        return _call("check_nested", node.lineno, node) if len(varying) > 1 else node

    visit_Dict = visit_List

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        return self.visit_List(node) if node.ctx == "load" else node


def _call(method: str, line: int, *arguments: nodes.Expr) -> nodes.Call:
    """A call of a method of `Sandbox` in a template."""
    name = nodes.EnvironmentAttribute(method, lineno=line)
    return nodes.Call(name, list(arguments), [], None, None, lineno=line)


def _check(value: Any = "") -> Any:
    if time.thread_time() > _deadline_s.get():
        raise LimitError(f"it has not ended after {MAX_RENDER_S:g} s")
    if isinstance(value, str | list | tuple | dict) and len(value) > MAX_VALUE_CHARS:
        raise LimitError(f"it makes a {type(value).__name__} of more than {MAX_VALUE_CHARS >> 20} Mi items")
    return value


def _check_nested(value: Any) -> None:
    """LimitError: lists inside lists, of which each is small, have too much in all."""
    num_items, size, stack = 0, 0, [value]
    while stack:
        item = stack.pop()
        num_items += 1
        size += len(item) if isinstance(item, str) else 0
        if num_items > _MAX_NESTED or size > MAX_VALUE_CHARS:
            raise LimitError("it puts lists into lists without end")
        if isinstance(item, Namespace):
            item = Namespace.__getattribute__(item, "_Namespace__attrs")
        if isinstance(item, dict):
            stack += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple):
            stack += item


def _check_product(left: Any, right: Any) -> None:
    for repeated, count in ((left, right), (right, left)):
        if isinstance(repeated, str | list | tuple) and isinstance(count, int):
            if len(repeated) * count > MAX_VALUE_CHARS:
                raise LimitError(f"it repeats a {type(repeated).__name__} {count} times")
        elif isinstance(repeated, int) and repeated.bit_length() > 1024:
            raise LimitError("it multiplies large numbers")


def _check_widths(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """LimitError: a function would make a long string in one step."""
    if name in _PADDING and any(
        isinstance(value, int) and value > MAX_VALUE_CHARS for value in (*args, *kwargs.values())
    ):
        raise LimitError(f"it calls {name} with a number above {MAX_VALUE_CHARS >> 20} Mi")


def _check_format(text: Any) -> None:
    """LimitError: a format such as %99999999d, which makes a long string in one step."""
    if _WIDE_FORMAT.search(str(text)):
        raise LimitError("it formats a value with a width of five digits")


def _bounded(name: str, filter_: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(filter_)  # also takes over the marks by which jinja2 passes the environment
    def bounded(*args: Any, **kwargs: Any) -> Any:
        _check_widths(name, args, kwargs)
        if name == "format":
            _check_format(args[0])
        return _check(filter_(*args, **kwargs))

    return bounded


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
        _check_nested(self)


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
