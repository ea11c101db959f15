"""Options of `distmk serve` for who may send requests: keys, names of hosts, and web pages of other sites."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from typing import Any

from distmk import env
from distmk.errors import UsageError, shown

_HOST = re.compile(r"\*|(\*\.)?[\w-]+(\.[\w-]+)*")
_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^\s/?#@]+")
_TOKEN = re.compile(r"\*|[\w!#$%&'+.^`|~-]+")

_LISTS = {
    "allowed_hosts": (
        "NAME",
        (),
        _HOST,
        "a name such as chat.example.com or *.example.com, without port, or * for any",
    ),
    "allowed_origins": ("ORIGIN", (), _ORIGIN, "an origin such as https://example.com, without path, or * for any"),
    "allowed_methods": ("METHOD", ("*",), _TOKEN, "a method such as POST, or * for all"),
    "allowed_headers": ("HEADER", ("*",), _TOKEN, "the name of a header, or * for all"),
}


def add_access_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("access", "Lists are given by repeating an option, or as JSON.")
    group.add_argument(
        "--api-key",
        action="append",
        default=[],
        metavar="KEY",
        help="a key that clients must send; may be repeated. DISTMK_API_KEY, which other users cannot see, adds one",
    )
    helps = {
        "allowed_hosts": "names by which clients may reach the server besides addresses, names without a dot, and its own; "
        "* for any. Without keys others are refused, as a web page may let its name point here",
        "allowed_origins": "web pages of other sites that may ask, and get CORS headers; * for any",
        "allowed_methods": "methods that such pages may use (default all)",
        "allowed_headers": "headers that such pages may send (default all)",
    }
    for name, text in helps.items():
        option = f"--{name.replace('_', '-')}"
        group.add_argument(option, action="append", default=[], metavar=_LISTS[name][0], help=text)
    group.add_argument(
        "--allow-credentials",
        action="store_true",
        help="let browsers send cookies and the like with such pages' requests",
    )


def access_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """The fields of `ServerConfig` for these options. UsageError: one of them is wrong."""
    key = env.api_key()
    several = len(arguments.api_key) > 1
    named = [(f"--api-key{f' {n}' if several else ''}", each) for n, each in enumerate(arguments.api_key, 1)]
    if key:
        named.append(("DISTMK_API_KEY", key))
    for name, each in named:
        _check_key(name, each)
    lists = {name: _read(name, getattr(arguments, name)) for name in _LISTS}
    return {
        "api_keys": tuple(each for _, each in named),
        "host": arguments.host,
        "allow_credentials": arguments.allow_credentials,
        **lists,
    }


def _check_key(name: str, key: str) -> None:
    """UsageError: no header can carry `key`. Messages do not show the key."""
    if not key:
        raise UsageError(f"{name} is empty; give a key, or leave it out")
    for position, letter in enumerate(key, 1):
        if not (" " <= letter <= "~" or "\xa0" <= letter <= "\xff"):
            raise UsageError(
                f"{name} has U+{ord(letter):04X} as character {position}, which no header can carry; give printable Latin-1"
            )
    if key != key.strip():
        raise UsageError(f"{name} begins or ends with a blank, which clients leave out; give it without")


def _read(name: str, given: Sequence[str]) -> tuple[str, ...]:
    _, default, pattern, expected = _LISTS[name]
    values: list[Any] = []
    for each in given:
        values += _json_list(each) if each.startswith("[") else [each]
    for value in values:
        if not isinstance(value, str) or not pattern.fullmatch(value):
            raise UsageError(f"--{name.replace('_', '-')} is {shown(value)}; expected {expected}")
    return tuple(values) or default


def _json_list(text: str) -> list[Any]:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        return [text]  # which is then refused
    return values if isinstance(values, list) else [text]
