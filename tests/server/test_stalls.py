"""No request holds up the others: /health answers within 100 ms while the worst bodies are read, refused or served.

A machine that is slower than usual gets more.
"""

from __future__ import annotations

import contextlib
import json
import resource
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from support.fake_engine import FakeEngine
from support.served import MODEL, Served, served
from support.yardstick import slowness

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
CONTEXT = 131_072
MIB = 1 << 20


@pytest.fixture(scope="module")
def large() -> Iterator[Served]:
    with served(FakeEngine(max_model_len=CONTEXT)) as running:
        yield running
        running.settled()


def body(**parameters: bytes) -> bytes:
    """A body from parameters in JSON."""
    given = {"model": f'"{MODEL}"'.encode(), **parameters}
    return b"{" + b",".join(b'"%s":%s' % (name.encode(), value) for name, value in given.items()) + b"}"


def many(item: bytes, count: int) -> bytes:
    return b"[" + b",".join([item] * count) + b"]"


MESSAGE = json.dumps({"role": "user", "content": ""}).encode()
TEXT = json.dumps("the cat sat on 7 mats. " * (5 * CONTEXT // 23))[1:-1].encode()
BODIES: dict[str, tuple[str, bytes, int, str | None]] = {
    "stop": (COMPLETIONS, body(prompt=b'"a"', stop=many(b"1", 1_000_000)), 400, "stop"),
    "stop_token_ids": (COMPLETIONS, body(prompt=b'"a"', stop_token_ids=many(b'"1"', 500_000)), 400, "stop_token_ids"),
    "tools": (COMPLETIONS, body(prompt=b'"a"', tools=many(b"{}", 60_000)), 400, "tools"),
    "names": (COMPLETIONS, body(prompt=b'"a"', **{f"x{i}": b"1" for i in range(130_000)}), 400, None),
    "more names": (COMPLETIONS, body(prompt=b'"a"', **{f"x{i}": b"1" for i in range(160_000)}), 400, None),
    "a wrong value": (COMPLETIONS, body(prompt=b'"a"', n=many(many(b"1", 900_000), 1)), 400, "n"),
    "messages": (CHAT, body(messages=many(b'"a"', 500_000)), 400, "messages"),
    "wrong messages": (CHAT, body(messages=many(b'"a"', CONTEXT)), 400, "messages.0"),
    "empty messages": (CHAT, body(messages=many(MESSAGE, 60_000)), 400, "messages"),
    "a long message": (CHAT, body(messages=many(MESSAGE.replace(b'""', b'"%s"' % TEXT), 1)), 400, "messages"),
    "a message of parts": (
        CHAT,
        body(messages=many(MESSAGE.replace(b'""', many(b'{"type":"text","text":"a"}', 30_000)), 1), max_tokens=b"1"),
        200,
        None,
    ),
    "tokens": ("/detokenize", body(tokens=many(b'"a"', CONTEXT)), 400, "tokens.0"),
    "prompts": (COMPLETIONS, body(prompt=many(b'"a"', 500_000)), 400, "n"),
    "ids": (COMPLETIONS, body(prompt=many(b"1", 1_000_000)), 400, "prompt"),
    "lists of ids": (COMPLETIONS, body(prompt=many(many(b"1", 16_000), 50), max_tokens=b"1"), 200, None),
    "completions": (COMPLETIONS, body(prompt=many(b"1", CONTEXT - 1), max_tokens=b"1", n=b"100"), 200, None),
    "lists": (COMPLETIONS, body(prompt=many(b"[]", 60_000)), 400, "n"),
    "more lists": (COMPLETIONS, body(prompt=many(b"[]", 600_000)), 400, None),
    "floats": (COMPLETIONS, body(prompt=many(b"0.1", 500_000)), 400, "prompt"),
    "long text": (COMPLETIONS, body(prompt=b'"%s"' % TEXT), 400, "prompt"),
    "text to count": ("/tokenize", body(prompt=b'"%s"' % TEXT), 200, None),
    "text to spell": ("/tokenize", body(prompt=b'"%s"' % TEXT, return_token_strs=b"true"), 200, None),
    "a prompt to echo": (COMPLETIONS, body(prompt=many(b"1", CONTEXT - 1), max_tokens=b"1", echo=b"true"), 200, None),
    "ids to decode": ("/detokenize", body(tokens=many(b"1", CONTEXT)), 200, None),
    "digits": (COMPLETIONS, body(prompt=b'"%s"' % (b"7" * (2 * MIB - 1000))), 400, "prompt"),
    "fewer digits": (COMPLETIONS, body(prompt=b'"%s"' % (b"7" * 900_000)), 400, "prompt"),
    "escapes": (COMPLETIONS, body(prompt=b'"%s"' % (b"\\n" * (MIB - 1000))), 400, "prompt"),
    "too large": (COMPLETIONS, body(prompt=b'"%s"' % (b"7" * (16 * MIB))), 413, None),
}


def ask(server: Served, path: str, raw: bytes) -> tuple[int, bytes]:
    """The status and body of an answer, asked for without work of Python's."""
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nconnection: close\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.sendall(f"{head}content-length: {len(raw)}\r\n\r\n".encode() + raw)
        answer = b"".join(iter(lambda: connection.recv(1 << 20), b""))
    return int(answer.split(b" ", 2)[1]), answer.partition(b"\r\n\r\n")[2]


@contextlib.contextmanager
def health(server: Served) -> Iterator[list[float]]:
    """Seconds that /health takes, asked for again and again for the length of the block.

    On a busy machine, only those count in which this process had a core.
    """
    times_s, ends = [], threading.Event()

    def watch() -> None:
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
            while not ends.wait(0.002):
                began_s, used_s = time.perf_counter(), time.process_time()
                connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
                assert b" 200 " in connection.recv(4096)
                times_s.append(min(time.perf_counter() - began_s, time.process_time() - used_s))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield times_s
    finally:
        ends.set()
        thread.join()


@pytest.mark.parametrize("name", BODIES)
def test_health_answers_meanwhile(large: Served, name: str) -> None:
    path, raw, status, param = BODIES[name]
    slowest_s = []
    for _ in range(6):  # a busy machine may hold up some
        with health(large) as times_s:
            time.sleep(0.01)
            got, answer = ask(large, path, raw)
            time.sleep(0.01)
        assert got == status, answer[:300]
        if status == 400:
            error = json.loads(answer)["error"]
            assert error["param"] == param and len(error["message"]) < 300, error
        slowest_s.append(max(times_s))
        if slowest_s[-1] < 0.1 * slowness():
            return
    raise AssertionError(f"/health took {slowest_s} s")


def test_the_body_fits_the_context() -> None:
    """A prompt as long as the context is taken in any spelling, and a much larger body is not."""
    with served(FakeEngine(max_model_len=300_000)) as server:
        for prompt in (
            b'"%s"' % (b"\\u0020\\u0061" * 299_000),
            many(b"    256", 299_000),
        ):
            assert ask(server, COMPLETIONS, body(prompt=prompt, max_tokens=b"1"))[0] == 200
        assert ask(server, COMPLETIONS, b" " * (19_200_001))[0] == 413
    with served() as server:
        assert ask(server, COMPLETIONS, b" " * (2 * MIB + 1))[0] == 413


def test_objects_of_a_body_are_few() -> None:
    """An error of pydantic's for each of many items would take gigabytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with served() as server:
        for name in ("stop", "stop_token_ids", "names", "messages", "digits"):
            path, raw, status, _ = BODIES[name]
            assert ask(server, path, raw)[0] == status
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 100 << 10  # KiB
