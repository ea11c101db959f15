"""Options for how tokens are chosen and where an answer ends: the fields of SamplingParams."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any

from distmk.engine.sampling_params import SamplingParams

_NUMBERS: dict[str, tuple[Callable[[str], Any], str, str]] = {
    "temperature": (float, "X", "0 takes the best token, 1 draws by the model's probabilities"),
    "top_p": (float, "X", "draw from the most probable tokens that sum up to X"),
    "top_k": (int, "N", "draw from the N most probable tokens"),
    "min_p": (float, "X", "draw from tokens of at least X times the highest probability"),
    "presence_penalty": (float, "X", "taken off the logits of tokens that were generated (default 0)"),
    "frequency_penalty": (float, "X", "taken off as often as they were (default 0)"),
    "repetition_penalty": (float, "X", "divides the logits of tokens of prompt and answer"),
}


def add_sampling_options(parser: argparse.ArgumentParser, max_tokens: int, defaults: str) -> None:
    """Add the options. `max_tokens`: its default. `defaults`: for the help, where the other defaults come from."""
    group = parser.add_argument_group("sampling", f"Defaults: {defaults}.")
    parser.add_argument(
        "--max-new-tokens",
        "--max-tokens",
        type=int,
        metavar="N",
        help=f"tokens of an answer (default {max_tokens})",
    )
    for name, (kind, metavar, text) in _NUMBERS.items():
        group.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar=metavar, help=text)
    parser.add_argument(
        "--sampling-seed",
        type=int,
        metavar="N",
        help="the same seed draws the same tokens, but for rounding (see --deterministic)",
    )
    parser.add_argument(
        "--stop", nargs="+", action="extend", default=[], metavar="TEXT", help="texts that end an answer"
    )
    parser.add_argument("--ignore-eos", action="store_true", help="go on to the full number of tokens")


def sampling_params(arguments: argparse.Namespace, defaults: Mapping[str, Any]) -> SamplingParams:
    """The options given, and `defaults` for the others, by field. UsageError: a value is out of range."""
    given = {name: getattr(arguments, name) for name in _NUMBERS} | {"max_tokens": arguments.max_new_tokens}
    fields = {**defaults, **{name: value for name, value in given.items() if value is not None}}
    return SamplingParams(ignore_eos=arguments.ignore_eos, seed=arguments.sampling_seed, stop=arguments.stop, **fields)
