"""Fixtures of the server's tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.browser import StrictEngine, chromium
from support.served import Served, served


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    """A server of a fast fake engine; nothing of any request may be left in the end."""
    with served() as running:
        yield running
        running.settled()


@pytest.fixture(scope="module")
def slow() -> Iterator[Served]:
    """A server of a strict engine that takes 5 ms a token."""
    with served(StrictEngine(tick_s=0.005)) as running:
        yield running
        running.settled()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """For a module: while there is one, the thread has a running event loop, which other modules' tests cannot have."""
    with chromium() as made:
        yield made
