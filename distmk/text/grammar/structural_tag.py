"""vLLM's structural tags: free text in which the text behind each trigger has a form."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from distmk.errors import UsageError, shown
from distmk.text.grammar.lark import json_value, literal, until

_EXPECTED = '{"structures": [{"begin": text, "schema": JSON schema, "end": text}], "triggers": [text]}'


def structural_tag_rules(given: str) -> tuple[str, str]:
    """The expression of a text with tags, and its rules. UsageError: `given` is not JSON of that form."""
    try:
        tag = json.loads(given)
        structures = [_structure(each) for each in tag["structures"]]
        triggers = [str(each) for each in tag["triggers"]]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise UsageError(f"structured_outputs.structural_tag is {shown(given)}; expected {_EXPECTED}") from None
    lines = ["tail_: TEXT_", "TEXT_: /(?s:.*)/"]
    for number, (begin, schema, end) in enumerate(structures):
        trigger = next((each for each in triggers if each and begin.startswith(each)), None)
        if trigger is None:
            raise UsageError(f"structured_outputs.structural_tag has {shown(begin)}, which no trigger begins")
        rest = f"{literal(begin[len(trigger) :])} {schema} {literal(end)}"
        lines.append(f"tag_{number}: until_{triggers.index(trigger)} {rest}")
    lines += [f"until_{number}[lazy]: {until(trigger)}" for number, trigger in enumerate(triggers) if trigger]
    tags = " | ".join(f"tag_{number}" for number in range(len(structures)))
    return f"({tags})* tail_", "\n".join(lines)


def _structure(given: Mapping[str, Any]) -> tuple[str, str, str]:
    """Its beginning, the expression between, and its end."""
    begin, end = given["begin"], given["end"]
    if not isinstance(begin, str) or not isinstance(end, str) or not isinstance(given["schema"], dict | bool):
        raise TypeError
    return begin, json_value(given["schema"]), end
