"""Which form of content a template reads: text, or a list of parts. Found in its syntax tree, as in vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jinja2 import nodes

from distmk.serving.chat.messages import joined_text


@dataclass(frozen=True)
class ContentForm:
    """What a template does with the content of a message.

    `loops`: it loops over the parts, as those of models that see do. `tests_text`: it asks whether the content is text.
    """

    loops: bool
    tests_text: bool

    @classmethod
    def of(cls, tree: nodes.Template) -> ContentForm:
        names = set(_content_names(tree))
        loops = any(_is_content(loop.iter, names) for loop in tree.find_all(nodes.For))
        return cls(loops, any(test.name == "string" for test in tree.find_all(nodes.Test)))

    def adapt(self, content: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
        """`content` in a form that the template reads."""
        if not self.loops:
            return joined_text(content)
        if isinstance(content, str) and not self.tests_text:
            return [{"type": "text", "text": content}]
        return content


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
