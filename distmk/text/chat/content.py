"""Which forms of a message a template reads. Found in its syntax tree, as vLLM does for content.

Content is text or a list of parts; arguments of tool calls are an object or JSON text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jinja2 import nodes

from distmk.text.chat.messages import joined_text


@dataclass(frozen=True)
class ContentForm:
    """What a template does with the content of a message and with the arguments of its tool calls.

    `loops`: it loops over the parts, as templates of multimodal models do. `tests_text`: it asks whether the content is text.
    `joins_arguments`: it writes arguments as the text that they are.
    """

    loops: bool
    tests_text: bool
    joins_arguments: bool = False

    @classmethod
    def of(cls, tree: nodes.Template) -> ContentForm:
        names = set(_content_names(tree))
        loops = any(_is_content(loop.iter, names) for loop in tree.find_all(nodes.For))
        tests_text = any(test.name == "string" for test in tree.find_all(nodes.Test))
        return cls(loops, tests_text, _joins_arguments(tree))

    def fit(self, message: dict[str, Any]) -> dict[str, Any]:
        """A message in the form that the template reads."""
        fitted = dict(message)
        if "content" in message:
            fitted["content"] = self.adapt(message["content"])
        if self.joins_arguments and "tool_calls" in message:
            fitted["tool_calls"] = [_with_text(call) for call in message["tool_calls"]]
        return fitted

    def adapt(self, content: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
        """`content` in a form that the template reads."""
        if not self.loops:
            return joined_text(content)
        if isinstance(content, str) and not self.tests_text:
            return [{"type": "text", "text": content}]
        return content


def without_content(messages: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Forms of a conversation whose tool calls have no content beside them: templates expect none, null or empty text.

    transformers leaves the key out, in its earlier versions it was null, and vLLM makes it empty.
    """
    yield messages
    if not all("content" in message for message in messages):
        for content in (None, ""):
            yield [{"content": content, **message} for message in messages]


def _joins_arguments(tree: nodes.Template) -> bool:
    """Whether arguments are joined to text, or written without being asked whether they are text."""
    joined: list[nodes.Node] = [side for add in tree.find_all(nodes.Add) for side in (add.left, add.right)]
    joined += [part for concat in tree.find_all(nodes.Concat) for part in concat.nodes]
    if not any(test.name == "string" and _is_arguments(test.node) for test in tree.find_all(nodes.Test)):
        joined += [part for output in tree.find_all(nodes.Output) for part in output.nodes]
    return any(map(_is_arguments, joined))


def _is_arguments(node: nodes.Node) -> bool:
    if isinstance(node, nodes.Getattr):
        return node.attr == "arguments"
    return isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) and node.arg.value == "arguments"


def _with_text(call: dict[str, Any]) -> dict[str, Any]:
    if "function" in call:
        return {**call, "function": _with_text(call["function"])}
    return {**call, "arguments": json.dumps(call["arguments"], ensure_ascii=False)}


def _content_names(tree: nodes.Template) -> Iterator[str]:
    """Variables that are set to the content of a message."""
    for assigned in tree.find_all(nodes.Assign):
        if isinstance(assigned.target, nodes.Name) and _is_content(assigned.node, set()):
            yield assigned.target.name


def _is_content(node: nodes.Node, names: set[str]) -> bool:
    """Whether an expression is message.content, message['content'] or a variable of `names`, perhaps through a filter."""
    while isinstance(node, nodes.Filter | nodes.Getitem) and isinstance(node.node, nodes.Node):
        if isinstance(node, nodes.Getitem) and not isinstance(node.arg, nodes.Slice):
            return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
        node = node.node
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    return isinstance(node, nodes.Name) and node.name in names
