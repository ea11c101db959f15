"""The engine's seed makes draws of requests without a seed repeat from run to run, as vLLM's does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from distmk import LLM, SamplingParams
from distmk.api.input_processor import RequestSeeds
from distmk.cli import main

Tokens = list[list[int]]


def drawn(model: Path, params: SamplingParams, **arguments: Any) -> tuple[Tokens, Tokens]:
    """The completions of two calls of a new engine, each of the same two prompts."""
    with LLM(str(model), num_workers=1, **arguments) as llm:
        calls = [llm.generate([[5, 6, 7], [5, 6, 7]], params) for _ in range(2)]
    first, second = ([list(one.token_ids) for each in call for one in each.outputs] for call in calls)
    return first, second


def test_runs_repeat(tiny_model: Path) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=12, n=2, ignore_eos=True)
    default = drawn(tiny_model, params)
    assert drawn(tiny_model, params, seed=0) == default == drawn(tiny_model, params)
    first, second = default
    assert len({tuple(tokens) for tokens in first + second}) == 8, "every completion has draws of its own"
    others = [drawn(tiny_model, params, seed=seed) for seed in (1, None, None)]
    assert len({str(found) for found in [default, *others]}) == 4
    params.seed = 3
    assert drawn(tiny_model, params, seed=1) == drawn(tiny_model, params, seed=None), "a request's own seed counts"


def test_the_command_repeats(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def generate(*arguments: str) -> list[int]:
        asked = ["--prompt-ids", "5,6,7", "--temperature", "1", "--max-tokens", "12", "--json", "--workers", "1"]
        assert main(["generate", "--model", str(tiny_model), *asked, *arguments]) == 0
        tokens: list[int] = json.loads(capsys.readouterr().out)["token_ids"]
        return tokens

    assert generate() == generate("--seed", "0") != generate("--seed", "1")


def test_seeds_are_spread() -> None:
    """Over 64 bits, and no two of a run alike: each bit is set in about half of them."""
    seeds = RequestSeeds(7)
    found = [seeds.draw() for _ in range(4000)]
    assert len(set(found)) == 4000 and all(-(1 << 63) <= seed < 1 << 63 for seed in found)
    for bit in range(64):
        assert 1700 < sum(seed >> bit & 1 for seed in found) < 2300, bit
