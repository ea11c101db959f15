"""HTTP connections that do not wait for ever for their client."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from distmk.server.config import ServerConfig

_LINGER_S = 1.0  # for which more of a header that is too large is dropped: a reset would take the answer with it
_REFUSAL = b"HTTP/1.1 %s\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class _HeaderTooLargeError(Exception):
    """Stops the parser."""


class BoundedConnection(HttpToolsProtocol):
    """uvicorn's connection with bounds: on the time and bytes until a header is complete, on the time in which a client takes
    nothing of an answer, and on the number of connections.

    uvicorn bounds only the time between two requests.
    """

    config_of_server: ServerConfig  # set by `bounded`

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._header_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._num_header_bytes = 0  # that came, while the header is not complete
        self._num_field_bytes = 0  # of the fields of one request, its trailers included
        self._refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.config_of_server.max_connections:
            return self._refuse(b"503 Service Unavailable")
        _give_up_on_silent_peers(transport, self.config_of_server.write_timeout_s)
        self._await_header()

    def on_message_begin(self) -> None:
        self._num_field_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count_field(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_field(len(name) + len(value))
        super().on_header(name, value)

    def _count_field(self, num_bytes: int) -> None:
        self._num_field_bytes += num_bytes
        if self._num_field_bytes > self.config_of_server.max_header_bytes:
            raise _HeaderTooLargeError

    def send_400_response(self, msg: str) -> None:
        """What uvicorn does when the parser has stopped."""
        if self._num_field_bytes <= self.config_of_server.max_header_bytes:
            super().send_400_response(msg)
        elif self.cycle is not None and not self.cycle.response_complete:
            self.transport.abort()
        else:
            self._refuse_header()

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        before = self.cycle
        super().data_received(data)
        if self._refused or self.transport.is_closing():
            return
        if self.cycle is not before or (self.cycle is not None and not self.cycle.response_complete):
            self._num_header_bytes = 0
            self._stop_header_timer()
            return
        self._num_header_bytes += len(data)
        if self._num_header_bytes > self.config_of_server.max_header_bytes:
            self._refuse_header()
        elif self._header_timer is None:
            self._await_header()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_header_timer()
        self._stop_write_timer()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stop_write_timer()
        self._write_timer = self.loop.call_later(self.config_of_server.write_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        self._stop_write_timer()
        super().resume_writing()

    def timeout_keep_alive_handler(self) -> None:
        if self.transport.get_write_buffer_size():  # which `close` would wait for
            self.transport.abort()
        super().timeout_keep_alive_handler()

    def _await_header(self) -> None:
        self._header_timer = self.loop.call_later(self.config_of_server.header_timeout_s, self._header_late)

    def _header_late(self) -> None:
        self._header_timer = None
        if self._num_header_bytes:
            self._refuse(b"408 Request Timeout")
        else:
            self.transport.close()

    def _refuse_header(self) -> None:
        self._refused = True
        self._stop_header_timer()
        self.transport.write(_REFUSAL % b"431 Request Header Fields Too Large")
        if self.transport.can_write_eof():  # with TLS it cannot
            self.transport.write_eof()
        self.loop.call_later(_LINGER_S, self.transport.close)

    def _refuse(self, status: bytes) -> None:
        self.transport.write(_REFUSAL % status)
        self.transport.close()

    def _stop_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None


def bounded(config: ServerConfig) -> type[asyncio.Protocol]:
    """The connection class for a server of `config`."""
    return cast("type[asyncio.Protocol]", type("Connection", (BoundedConnection,), {"config_of_server": config}))


def _give_up_on_silent_peers(transport: asyncio.Transport, limit_s: float) -> None:
    """Let the kernel end a connection whose peer acknowledges nothing for `limit_s`, also while nothing is sent."""
    connection = transport.get_extra_info("socket")
    seconds = max(1, round(limit_s))
    with contextlib.suppress(OSError):  # not every kernel has all of them
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, seconds)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, seconds)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * seconds)
