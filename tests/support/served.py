"""A server of the fake engine, or of a real one, in a thread of the test's process."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
from support.fake_engine import FakeEngine, until

from distmk import LLM
from distmk.server import run
from distmk.server.config import ServerConfig
from distmk.server.state import ServerState

MODEL = "fake"


@dataclass
class Served:
    engine: Any
    url: str
    port: int
    state: ServerState
    ended: threading.Event
    errors: list[BaseException]

    @property
    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=20)

    def settled(self) -> None:
        """AssertionError unless nothing is left of any request: no sequence, no slot, no page of the KV cache."""

        def is_left() -> bool:
            now = self.engine.stats()
            return bool(now.num_running or now.num_waiting or now.num_free_kv_pages < now.num_kv_pages)

        until(lambda: not (is_left() or self.state.num_sequences))


@contextlib.contextmanager
def served(engine: FakeEngine | LLM | None = None, **config: Any) -> Iterator[Served]:
    """Serve with an engine, which is closed in the end; `config`: fields of `ServerConfig`."""
    engine = engine or FakeEngine()
    settings = ServerConfig(**{"served_model_name": MODEL, **config})
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
