"""Fixtures of the server's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.served import Served, served


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    """A server of a fast fake engine; nothing of any request may be left in the end."""
    with served() as running:
        yield running
        running.settled()
