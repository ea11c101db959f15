"""What models of several families write, made from what they mean: content, reasoning and tool calls."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from typing import Any

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "deep": {"type": "object"},
                    "is_on": {"type": "boolean"},
                },
            },
        },
    }
    for name in ("get_weather", "f", "read_file")
]
_WORDS = (
    "Paris",
    "é漢🙂",
    "a  b",
    'q"uo',
    "back\\slash",
    "line\nbreak",
    "</tool_call>",
    "{",
    "}]",
    "<",
    "[f(x=1)]",
    "; ",
)
_TALK = (
    "Let me see.",
    "I like < and > and {braces}.",
    "[1, 2]",
    "é漢🙂",
    "a\n\nb",
    "</think",
    "<tool",
    "<function",
    "[TOOL",
)


@dataclass(frozen=True)
class Meant:
    """What an output says, which parsers are to find in it."""

    content: str = ""
    calls: list[tuple[str, Any]] = field(default_factory=list)  # name, arguments


def random_meaning(rng: random.Random, most_calls: int = 3) -> Meant:
    content = " ".join(rng.choice(_TALK) for _ in range(rng.randrange(4)))
    return Meant(
        content, [(rng.choice(("get_weather", "f")), _arguments(rng)) for _ in range(rng.randint(0, most_calls))]
    )


def _arguments(rng: random.Random) -> dict[str, Any]:
    values: dict[str, Any] = {
        "city": "".join(rng.choice(_WORDS) for _ in range(rng.randrange(4))),
        "days": rng.randrange(-5, 100),
        "deep": {"list": [1.5, None, True, rng.choice(_WORDS)], "empty": {}},
        "is_on": rng.random() < 0.5,
    }
    return {name: value for name, value in values.items() if rng.random() < 0.6}


def write(family: str, meant: Meant, rng: random.Random) -> str:
    """The text in which a model of the family says it; content comes before calls where the format has both."""
    calls = [_WRITERS[family](name, arguments, rng) for name, arguments in meant.calls]
    between = meant.content + ("\n" if calls and meant.content else "")
    match family:
        case "hermes" | "qwen3" | "qwen3_json":
            return between + "\n".join(calls)
        case "mistral":
            return between + (f"[TOOL_CALLS] [{', '.join(calls)}]" if calls else "")
        case "mistral_named":
            return between + "".join(calls)
        case "granite":
            return between + (f"<|tool_call|>[{', '.join(calls)}]" if calls else "")
        case "llama3_json":
            return "; ".join(calls) if calls else meant.content
        case "pythonic":
            return f"[{', '.join(calls)}]" if calls else meant.content
    raise AssertionError(family)


def has_content(family: str, meant: Meant) -> bool:
    """Whether the content of `meant` is part of the text."""
    return not meant.calls or family not in ("llama3_json", "pythonic")


def _json(name: str, arguments: dict[str, Any], rng: random.Random, key: str = "arguments") -> str:
    call = {"name": name, key: arguments}
    if key == "arguments" and rng.random() < 0.3:
        call = {key: arguments, "name": name}
    indent = rng.choice((None, None, 2))
    return json.dumps(call, ensure_ascii=rng.random() < 0.5, indent=indent)


def _hermes(name: str, arguments: dict[str, Any], rng: random.Random) -> str:
    return f"<tool_call>\n{_json(name, arguments, rng)}\n</tool_call>"


def _qwen3(name: str, arguments: dict[str, Any], rng: random.Random) -> str:
    def text(value: Any) -> str:
        if isinstance(value, bool):
            return str(value)  # Python's spelling, as the model's template has it
        return value if isinstance(value, str) else json.dumps(value)

    lines = "".join(f"<parameter={key}>\n{text(value)}\n</parameter>\n" for key, value in arguments.items())
    call = f"<function={name}>\n{lines}</function>"
    return f"<tool_call>\n{call}\n</tool_call>" if rng.random() < 0.8 else call + "\n</tool_call>"


def _mistral_named(name: str, arguments: dict[str, Any], rng: random.Random) -> str:
    between = rng.choice(("", "[ARGS]", "[CALL_ID]aB3dE6gH9[ARGS]"))
    return f"[TOOL_CALLS]{name}{between}{json.dumps(arguments)}"


def _pythonic(name: str, arguments: dict[str, Any], rng: random.Random) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


_WRITERS = {
    "hermes": _hermes,
    "qwen3": _qwen3,
    "qwen3_json": _hermes,
    "mistral": _json,
    "mistral_named": _mistral_named,
    "granite": _json,
    "llama3_json": lambda name, arguments, rng: _json(name, arguments, rng, "parameters"),
    "pythonic": _pythonic,
}
WRITTEN = tuple(_WRITERS)


def pieces_of(text: str, rng: random.Random) -> list[str]:
    """The text in random pieces."""
    pieces, longest = [], rng.choice((1, 2, 5, 40))
    while text:
        size = rng.randint(1, longest)
        pieces.append(text[:size])
        text = text[size:]
    return pieces


def damaged(text: str, rng: random.Random) -> str:
    """The text cut off, or with some characters lost, doubled or replaced."""
    if rng.random() < 0.4:
        return text[: rng.randrange(len(text) + 1)]
    letters = list(text)
    for _ in range(rng.randint(1, 4)):
        if letters:
            at = rng.randrange(len(letters))
            letters[at] = rng.choice(("", letters[at] * 2, '"', "}", "\\", "<", "'", "]", "\x00", "\ud800"))
    return "".join(letters)
