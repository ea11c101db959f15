"""Random JSON schemas and regular expressions, of what grammars understand."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]

_NAMES = ["name", "a", "Größe", "x y", 'quo"te', "city", "漢", "list", "n_1", "back\\slash"]


def random_schema(rng: random.Random, depth: int = 3) -> Schema:
    """A schema whose values are not long: strings and lists are bounded."""
    simple: list[Callable[[], Schema]] = [
        lambda: {"type": "boolean"},
        lambda: {"type": "null"},
        lambda: {"const": rng.choice([3, "c", None, True, 'q"'])},
        lambda: {"enum": rng.sample([1, -2, "x", "漢", "a b", None, False, 2.5, 'q"', "\\"], rng.randint(1, 5))},
        lambda: _integer(rng),
        lambda: _integer(rng),
        lambda: _string(rng),
        lambda: _string(rng),
        lambda: {"type": ["string", "null"], "maxLength": 4},
    ]
    if depth == 0:
        return rng.choice(simple)()
    nested: list[Callable[[], Schema]] = [
        lambda: _object(rng, depth),
        lambda: _object(rng, depth),
        lambda: _array(rng, depth),
        lambda: {"anyOf": [random_schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]},
    ]
    return rng.choice(simple + nested)()


def random_object(rng: random.Random, depth: int = 2) -> Schema:
    """A schema of an object, such as the arguments of a function."""
    return _object(rng, depth)


def _integer(rng: random.Random) -> Schema:
    schema: Schema = {"type": "integer"}
    if rng.random() < 0.7:
        schema["minimum"] = rng.randint(-1000, 1000)
        schema["maximum"] = schema["minimum"] + rng.randint(0, 2000)
    return schema


def _string(rng: random.Random) -> Schema:
    if rng.random() < 0.3:
        return {"type": "string", "pattern": f"^{random_regex(rng, 1)}$"}
    if rng.random() < 0.3:
        return {"type": "string", "format": rng.choice(["uuid", "ipv4"])}
    least = rng.randint(0, 3)
    return {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 6)}


def _array(rng: random.Random, depth: int) -> Schema:
    least = rng.randint(0, 2)
    return {
        "type": "array",
        "items": random_schema(rng, depth - 1),
        "minItems": least,
        "maxItems": least + rng.randint(0, 2),
    }


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(_NAMES, rng.randint(0, 4))
    return {
        "type": "object",
        "properties": {name: random_schema(rng, depth - 1) for name in names},
        "required": [name for name in names if rng.random() < 0.6],
        "additionalProperties": False,
    }


def random_regex(rng: random.Random, depth: int = 2) -> str:
    """A regular expression that Python and Rust read alike, for texts that are not long."""
    if depth == 0:
        return rng.choice(["a", "bc", "[a-f]", '[^a-z "]', r"\.", "/", "é", "[0-9]", "-", '"', " ", "[0-9_]", "漢"])
    inner = [random_regex(rng, depth - 1) for _ in range(rng.randint(1, 3))]
    made = rng.choice(["".join(inner), f"({'|'.join(inner)})"])
    return f"({made}){rng.choice(['?', '{2}', '{1,3}', '*', '+'])}" if rng.random() < 0.4 else made
