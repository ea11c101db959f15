"""A server of the fake engine, in a thread of the test's process."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
from support.fake_engine import FakeEngine, until

from distmk.server import run
from distmk.server.config import ServerConfig
from distmk.server.state import ServerState

MODEL = "fake"


@dataclass
class Served:
    engine: FakeEngine
    url: str
    port: int
    state: ServerState
    ended: threading.Event
    errors: list[BaseException]

    @property
    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=20)

    def settled(self) -> None:
        """AssertionError unless nothing is left of any request."""
        until(lambda: self.engine.num_left == 0 and self.state.num_sequences == 0)


@contextlib.contextmanager
def served(engine: FakeEngine | None = None, **config: Any) -> Iterator[Served]:
    """Serve; `config`: fields of `ServerConfig`."""
    engine = engine or FakeEngine()
    settings = ServerConfig(**{"served_model_name": MODEL, "max_num_seqs": engine.max_num_seqs, **config})
    bound = run.bind("127.0.0.1", 0)
    port = bound.getsockname()[1]
    server = run.Server(engine, settings, bound)
    ended, errors = threading.Event(), []

    def work() -> None:
        try:
            server.run(sockets=[bound])
        except BaseException as error:
            errors.append(error)
        finally:
            ended.set()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    until(lambda: server.started or ended.is_set(), 10)
    try:
        yield Served(engine, f"http://127.0.0.1:{port}", port, server.state, ended, errors)
    finally:
        server.should_exit = server.cuts_off = True
        thread.join(10)
        engine.close()
        assert not thread.is_alive()
