"""A server's life: it listens, drains on SIGTERM, and ends when the engine ends."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import cast

import uvicorn

from distmk.api.async_llm import AsyncLLM
from distmk.api.token_stream import EngineClient
from distmk.console import tell
from distmk.errors import DistmkError, Interrupted, UsageError
from distmk.interrupts import signals_to
from distmk.open_files import room_for_files
from distmk.server.app import build_app
from distmk.server.body_reader import fitting_body_bytes
from distmk.server.config import ServerConfig
from distmk.server.connections import BoundedConnection, bounded
from distmk.server.request_log import logging_from
from distmk.server.state import ServerState

_BACKLOG = 1024  # connections that wait to be accepted, also while the model is loaded
_POLL_S = 0.05
_SWITCH_S = 1e-3
_CUT_OFF_S = 5.0  # for requests to end after their connections were broken


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens on an address, which is claimed before a model is loaded.

    The second of two servers that start on one port is refused at once. Clients that come early wait. UsageError: the address
    cannot be had.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (OSError, UnicodeError, OverflowError):
        raise UsageError(f"--host {host!r} is no address or name of this machine") from None
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        # For a restart, while connections of the server before are in TIME_WAIT. Two sockets may then be bound to one port
        # until one of them listens.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen(_BACKLOG)
    except OSError as error:
        bound.close()
        raise UsageError(
            f"cannot listen on {host} port {port} ({error.strerror}); give another --host or --port"
        ) from None
    return bound


def serve(llm: EngineClient, config: ServerConfig, bound: socket.socket) -> None:
    """Serve until SIGTERM or Ctrl-C, on the main thread.

    The first signal drains: new requests are refused and /health has status 503, requests under way end, for at most `drain_s`;
    a second signal ends them at once. Interrupted: it was Ctrl-C. DistmkError: the engine has ended.
    """
    server = Server(llm, config, bound)
    with logging_from(config.log_level):
        server.run(sockets=[bound])
    if server.state.engine_error is not None:
        raise server.state.engine_error.with_traceback(None)
    if server.interrupted:
        raise Interrupted("interrupted")


@contextlib.contextmanager
def _short_pauses() -> Iterator[None]:
    """Keep Python's own pauses short, because every token would wait for them. The collector skips objects that were loaded
    before, and a thread that computes lets others run within a millisecond.
    """
    interval_s = sys.getswitchinterval()
    gc.collect()
    gc.freeze()
    sys.setswitchinterval(_SWITCH_S)
    try:
        yield
    finally:
        sys.setswitchinterval(interval_s)
        gc.unfreeze()


class Server(uvicorn.Server):
    def __init__(self, llm: EngineClient, config: ServerConfig, bound: socket.socket) -> None:
        async_llm = AsyncLLM(llm, chat_template=config.chat_template)
        config = replace(
            config,
            max_connections=min(config.max_connections, room_for_files()),
            max_body_bytes=config.max_body_bytes or fitting_body_bytes(async_llm.max_model_len),
        )
        self.state = ServerState(async_llm, config)
        self.interrupted = False
        self.cuts_off = False  # what is under way shall not go on
        self._drain_until_s: float | None = None  # of the monotonic clock, once it drains
        self._address = bound.getsockname()
        super().__init__(
            uvicorn.Config(
                build_app(self.state),
                http=bounded(config),
                ws="none",
                ssl_certfile=config.ssl_certfile,
                ssl_keyfile=config.ssl_keyfile,
                lifespan="off",
                log_level="error",
                access_log=False,
                server_header=False,
                backlog=_BACKLOG,
                timeout_graceful_shutdown=round(config.drain_s + _CUT_OFF_S),
            )
        )

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        with _short_pauses():
            super().run(sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._watch = asyncio.ensure_future(self._watch_engine())
        host, port = self._address[:2]
        shown = f"[{host}]" if ":" in host else host
        scheme = "http" if self.state.config.ssl_certfile is None else "https"
        tell(f"serving {self.state.config.served_model_name} on {scheme}://{shown}:{port} (Ctrl-C ends)")

    async def on_tick(self, counter: int) -> bool:
        """Whether the main loop ends: once it has drained. Until then, connections are accepted as before."""
        if self.state.draining and self._drained():
            return True
        return await super().on_tick(counter)

    def _drained(self) -> bool:
        count, drain_s = self.state.num_sequences, self.state.config.drain_s
        if self._drain_until_s is None:
            self._drain_until_s = time.monotonic() + drain_s
            if count and self.state.engine_error is None:
                tell(f"finishing {count} sequence{'s'[: count > 1]}, for at most {drain_s:g} s")
        return not count or self.cuts_off or time.monotonic() >= self._drain_until_s

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept no more connections, and wait until open ones have sent their answers."""
        self.state.draining = True
        cutting_off = asyncio.ensure_future(self._cut_off())
        await super().shutdown(sockets)
        for task in (cutting_off, self._watch):
            task.cancel()

    async def _cut_off(self) -> None:
        """Break the connections that are left when the time for draining is over, or a second signal comes.

        Their clients see that the answer is not whole, and their requests are cancelled as if they had left.
        """
        until_s = self._drain_until_s or time.monotonic() + self.state.config.drain_s
        while not self.cuts_off and time.monotonic() < until_s:
            await asyncio.sleep(_POLL_S)
        for connection in list(self.server_state.connections):
            cast("BoundedConnection", connection).transport.abort()

    async def _watch_engine(self) -> None:
        """Note the engine's end, let /health tell it for a moment, and end the server."""
        config = self.state.config
        while True:
            try:
                self.state.llm.stats()
            except DistmkError as error:
                self.state.engine_failed(error)
            if self.state.engine_error is not None:
                await asyncio.sleep(config.engine_error_s)
                self.should_exit = self.cuts_off = True
                return
            await asyncio.sleep(config.watch_s)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Instead of uvicorn's, which raises the signal again in the end."""
        with signals_to(self._signalled):
            yield

    def _signalled(self, number: int, frame: object) -> None:
        self.cuts_off |= self.state.draining
        self.interrupted |= number == signal.SIGINT
        self.state.draining = True
