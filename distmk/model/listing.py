"""A model's operators as text and as a drawing."""

from __future__ import annotations

import re
from collections.abc import Sequence
from xml.sax.saxutils import escape

from distmk.model.nodes import Node, in_order

ROW, COLUMN, BOX_HEIGHT, MARGIN = 46, 250, 30, 24  # pixels of a drawing
MAX_LABEL = 36  # characters


def listing(output: Node) -> list[str]:
    """One line for each operator. Inputs come first, and an operator names them by number."""
    order = in_order(output)
    number = {id(node): index for index, node in enumerate(order)}
    lines = []
    for index, node in enumerate(order):
        inputs = ", ".join(f"%{number[id(value)]}" for value in node.inputs)
        lines.append(f"%{index} = {node.describe(inputs)}")
    return lines


def drawing(stages: Sequence[tuple[str, Node]]) -> str:
    """SVG of the operators that several outputs depend on, side by side under their titles; data flows downwards."""
    parts, x, height = [], MARGIN, 0
    for title, output in stages:
        rows = _rows(output)
        parts.append(f'<text x="{x}" y="{MARGIN}" class="title">{escape(title)}</text>')
        parts += _stage(rows, x)
        x += COLUMN * max(map(len, rows)) + MARGIN
        height = max(height, MARGIN + ROW * (len(rows) + 1))
    style = (
        "text{font:12px sans-serif;fill:#222}.title{font-weight:bold}rect{fill:#eef3fa;stroke:#4a6fa5}"
        "line{stroke:#4a6fa5;marker-end:url(#arrow)}"
    )
    arrow = (
        '<marker id="arrow" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0L8 4L0 8z" fill="#4a6fa5"/></marker>'
    )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{x}" height="{height}"><style>{style}</style><defs>{arrow}</defs>'
    background = '<path d="M0 0h100000v100000H0z" fill="#fff"/>'
    return "\n".join([head, background, *parts, "</svg>", ""])


def _rows(output: Node) -> list[list[Node]]:
    """Operators by the number of operators on the longest way to them."""
    depth: dict[int, int] = {}
    rows: list[list[Node]] = []
    for node in in_order(output):
        depth[id(node)] = level = 1 + max((depth[id(value)] for value in node.inputs), default=-1)
        rows += [[] for _ in range(level + 1 - len(rows))]
        rows[level].append(node)
    return rows


def _stage(rows: list[list[Node]], left: int) -> list[str]:
    place = {
        id(node): (left + COLUMN * index, MARGIN + ROW * (level + 1) - BOX_HEIGHT)
        for level, row in enumerate(rows)
        for index, node in enumerate(row)
    }
    boxes, lines = [], []
    for row in rows:
        for node in row:
            x, y = place[id(node)]
            boxes.append(
                f'<g><title>{escape(node.describe())}</title><rect x="{x}" y="{y}" width="{COLUMN - MARGIN}" '
                f'height="{BOX_HEIGHT}" rx="4"/><text x="{x + 8}" y="{y + 19}">{escape(_label(node))}</text></g>'
            )
            for value in node.inputs:
                from_x, from_y = place[id(value)]
                middle = (COLUMN - MARGIN) // 2
                ends = f'x1="{from_x + middle}" y1="{from_y + BOX_HEIGHT}" x2="{x + middle}" y2="{y}"'
                lines.append(f"<line {ends}/>")
    return lines + boxes


def _label(node: Node) -> str:
    """The operator, and the last part of the names of its weights."""
    names = [re.sub(r".*\.", "", name) for name in node.tensors]
    text = f"{node.kind} {', '.join(names)}"
    return text if len(text) <= MAX_LABEL else text[: MAX_LABEL - 1] + "…"
