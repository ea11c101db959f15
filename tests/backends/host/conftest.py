"""The command of a tiny model that generates for minutes, to have time to do things to it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.faults import generate_command


@pytest.fixture
def command(endless: Path) -> Callable[..., list[str]]:
    """The command of a generate; without `tokens` it would take minutes."""
    return lambda *more, tokens=150_000: generate_command(endless, "--workers", "1", *more, tokens=tokens)
