"""Clients that leave, stall, or send too much: the server serves on, and nothing of their requests is left."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import socket
import time
from collections.abc import Iterator

import httpx
import pytest
from support.fake_engine import FakeEngine, until
from support.served import MODEL, Served, served
from support.yardstick import slowness

from distmk.server import connections

ENDLESS = {"model": MODEL, "prompt": "the", "max_tokens": 4000, "ignore_eos": True}


@pytest.fixture(scope="module")
def slow() -> Iterator[Served]:
    """A server whose requests take for ever, with short limits."""
    limits = {"header_timeout_s": 0.5, "body_timeout_s": 0.5, "write_timeout_s": 1.0, "max_body_bytes": 1 << 20}
    with served(FakeEngine(tick_s=0.01), **limits) as running:
        yield running
        running.settled()


def head(path: str = "/v1/completions", length: int | None = None, **headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "host: a", "content-type: application/json"]
    lines += [f"content-length: {length}"] if length is not None else []
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode()


def connect(server: Served) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=10)


def closed_after(connection: socket.socket) -> tuple[float, bytes]:
    """Seconds until the server closes, and what it sent."""
    began, received = time.monotonic(), b""
    with contextlib.suppress(ConnectionError):
        while piece := connection.recv(65536):
            received += piece
    return time.monotonic() - began, received


@pytest.mark.whole
def test_1000_clients_that_disconnect(slow: Served) -> None:
    """200 at a time: in the queue, before and while tokens come, of streams and of whole answers; every request is cancelled."""
    before = slow.engine.num_submitted
    bodies = [json.dumps({**ENDLESS, "stream": number % 3 != 0}).encode() for number in range(3)]

    async def one(number: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", slow.port)
        body = bodies[number % 3]
        writer.write(head(length=len(body)) + body)
        await writer.drain()
        if number % 3 == 1:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(reader.readuntil(b"data: "), 0.1)
        await asyncio.sleep(0.002 * (number % 50))
        if number % 2:
            writer.transport.abort()  # with a reset
        writer.close()

    async def all_of_them() -> None:
        for wave in range(5):
            await asyncio.gather(*(one(200 * wave + number) for number in range(200)))

    asyncio.run(all_of_them())
    slow.settled()
    assert slow.engine.num_submitted - before > 700
    assert slow.engine.num_cancelled > 700
    answer = slow.http.post("/v1/completions", json={"model": MODEL, "prompt": "the", "max_tokens": 2})
    assert answer.status_code == 200
    assert 'finished_reason="abort"' in slow.http.get("/metrics").text


def test_large_bodies(slow: Served) -> None:
    """100 MB, announced and in chunks: refused without their memory, also for clients that send all before they read."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def endless() -> Iterator[bytes]:
        for _ in range(1600):
            yield b"a" * (64 << 10)

    for length in ({"content-length": str(1600 * (64 << 10))}, {}):
        answer = slow.http.post(
            "/v1/completions", content=endless(), headers={"content-type": "application/json", **length}
        )
        assert answer.status_code == 413, answer.text
        assert answer.json()["error"]["type"] == "invalid_request_error"
    with connect(slow) as connection:
        connection.sendall(head(length=10**15))
        assert b" 413 " in closed_after(connection)[1]
    with connect(slow) as connection:  # an honest client asks before it sends
        connection.sendall(head(length=100 << 20, expect="100-continue"))
        received = closed_after(connection)[1]
        assert b" 413 " in received and b"100 Continue" not in received
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 40 << 10  # KiB
    slow.settled()


def test_many_large_bodies_at_once() -> None:
    """Their memory together is bounded: the others are told to come back."""
    with served(max_body_bytes=1 << 20, max_bodies_bytes=3 << 20, body_timeout_s=0.5) as server:
        connections = [connect(server) for _ in range(8)]
        for connection in connections:
            connection.sendall(head(length=1 << 20) + b" " * (1_000_000))
        statuses = sorted(closed_after(connection)[1].split()[1] for connection in connections)
        assert set(statuses) == {b"408", b"503"} and statuses.count(b"503") >= 4
        for connection in connections:
            connection.close()
        until(lambda: server.http.post("/tokenize", json={"prompt": "the"}).status_code == 200)


def test_half_open_connections(slow: Served) -> None:
    """Connections that send nothing, a part of a header, or a part of a body, are closed after a time each; others are served."""
    beginnings = [b"", b"POST /v1/comp", head(length=50)[:-2], head(length=50), head(length=50) + b'{"prompt"', b"\r\n"]
    connections = [connect(slow) for _ in range(10) for _ in beginnings]
    for number, connection in enumerate(connections):
        connection.sendall(beginnings[number % len(beginnings)])
    assert slow.http.get("/health").status_code == 200
    after_a_request = connect(slow)
    after_a_request.sendall(b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n")
    assert b" 200 " in after_a_request.recv(4096)
    after_a_request.sendall(b"GET /heal")
    began = time.monotonic()
    for number, connection in enumerate([*connections, after_a_request]):
        _, received = closed_after(connection)
        connection.close()
        wants = number % len(beginnings) if number < len(connections) else 1
        assert (b" 408 " in received) == (wants != 0), (wants, received)
    assert time.monotonic() - began < 5 * slowness()


def test_endless_headers(slow: Served) -> None:
    """In pieces, in one segment that the parser takes whole, and behind a body."""
    for piece in (b"x-more: " + b"a" * 1000 + b"\r\n", b"a" * 1000):
        with connect(slow) as connection, contextlib.suppress(ConnectionError):
            connection.sendall(b"GET /health HTTP/1.1\r\n" + (b"" if piece.endswith(b"\n") else b"x: "))
            for _ in range(2000):
                connection.sendall(piece)
            assert b" 431 " in closed_after(connection)[1]
    many = b"".join(b"x-%d: %s\r\n" % (number, b"a" * 1000) for number in range(70))
    for fields in (many, b"x: " + b"a" * 70_000 + b"\r\n"):
        with connect(slow) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: a\r\n" + fields + b"\r\n")
            assert closed_after(connection)[1].startswith(b"HTTP/1.1 431 ")
    with connect(slow) as connection:
        connection.sendall(b"GET /%s HTTP/1.1\r\nhost: a\r\n\r\n" % (b"a" * 70_000))
        assert closed_after(connection)[1].startswith(b"HTTP/1.1 431 ")
    with connect(slow) as connection, contextlib.suppress(ConnectionError):
        connection.sendall(head(transfer_encoding="chunked") + b"1\r\n{\r\n0\r\n" + many + b"\r\n")
        assert b" 400 " not in closed_after(connection)[1]  # the body was not read to its end
    with connect(slow) as connection:  # what fits, fits in one segment too
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: a\r\n" + many[:60_000] + b"\r\n\r\n")
        assert connection.recv(4096).startswith(b"HTTP/1.1 200 ")
    assert slow.http.get("/health").status_code == 200


@pytest.mark.whole
@pytest.mark.parametrize("by", ["timer", "kernel"])
def test_a_client_that_reads_nothing(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its request is cancelled once its connection takes nothing for a while, as either of two guards sees."""
    if by == "timer":
        monkeypatch.setattr(connections, "_give_up_on_silent_peers", lambda transport, limit_s: None)
    else:
        monkeypatch.setattr(connections.BoundedConnection, "pause_writing", connections.HttpToolsProtocol.pause_writing)
    with served(FakeEngine(max_model_len=1 << 20), write_timeout_s=0.5) as server:
        body = json.dumps({**ENDLESS, "max_tokens": 1_000_000, "stream": True}).encode()
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", server.port))
        connection.sendall(head(length=len(body)) + body)
        until(lambda: server.engine.num_left == 1)
        server.settled()
        assert server.engine.num_cancelled == 1
        connection.close()


def test_a_full_queue() -> None:
    """More than may run and wait are told to come back; those that wait get their answers."""

    async def ask(server: Served) -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=server.url, timeout=20) as client:
            body = {"model": MODEL, "prompt": "the", "max_tokens": 20, "ignore_eos": True}
            return await asyncio.gather(*(client.post("/v1/completions", json=body) for _ in range(12)))

    with served(FakeEngine(tick_s=0.01, max_num_seqs=2), max_queue=3) as server:
        answers = asyncio.run(ask(server))
        refused = [answer for answer in answers if answer.status_code == 429]
        assert len(refused) == 7 and all(answer.headers["retry-after"] == "1" for answer in refused)
        assert refused[0].json()["error"]["type"] == "rate_limit_error"
        assert sum(answer.status_code == 200 for answer in answers) == 5
        assert 'distmk:requests_refused_total{engine="0",model_name="fake"} 7.0' in server.http.get("/metrics").text
        server.settled()


def test_too_many_connections() -> None:
    with served(max_connections=20) as server:
        connections = [connect(server) for _ in range(20)]
        time.sleep(0.1)
        with connect(server) as one_more:
            assert b" 503 " in closed_after(one_more)[1]
        for connection in connections:
            connection.close()
        until(lambda: server.http.get("/health").status_code == 200)
