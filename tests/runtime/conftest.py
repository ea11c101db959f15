"""A tiny model that generates for minutes, to have time to do things to it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.faults import generate_command, write_config
from support.tiny_config import tiny_config


@pytest.fixture(scope="session")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The config of a tiny model whose context lets it generate for minutes."""
    return write_config(tiny_config(), tmp_path_factory.mktemp("endless") / "config.json")


@pytest.fixture
def command(endless: Path) -> Callable[..., list[str]]:
    """The command of a generate; without `tokens` it would take minutes."""
    return lambda *more, tokens=150_000: generate_command(endless, "--workers", "1", *more, tokens=tokens)
