"""How a server begins and ends: addresses, draining, signals, an engine that ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import openai
import pytest
from support.fake_engine import FakeEngine, until
from support.helpers import ROOT
from support.served import MODEL, served

from distmk.errors import RankLostError, UsageError
from distmk.server import run

LOST = RankLostError("rank 1 was lost: its process ended with signal 9")
JOB = """
import sys
from support.fake_engine import FakeEngine
from distmk.cli.exit_status import report
from distmk.errors import DistmkError
from distmk.server import run
from distmk.server.config import ServerConfig
bound = run.bind("127.0.0.1", 0)
print(bound.getsockname()[1], flush=True)
engine = FakeEngine(tick_s=0.02)
try:
    run.serve(engine, ServerConfig("fake", drain_s=float(sys.argv[1])), bound)
except DistmkError as error:
    sys.exit(report(error))
finally:
    print("left", engine.num_left, flush=True)
"""


def start(drain_s: float) -> tuple[subprocess.Popen[str], str]:
    """A server in a process of its own, and its address."""
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    command = [sys.executable, "-c", JOB, str(drain_s)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
    assert process.stdout is not None
    url = f"http://127.0.0.1:{int(process.stdout.readline())}"
    until(lambda: answers(url), 20)
    return process, url


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.HTTPError:
        return False


def stream(url: str, num_tokens: int) -> tuple[threading.Thread, list[str], threading.Event]:
    """A client that reads a stream in a thread: the lines so far, and whether the first one came."""
    lines, began = [], threading.Event()

    def read() -> None:
        body = {"model": MODEL, "prompt": "the", "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
        try:
            with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=20) as answer:
                for line in answer.iter_lines():
                    lines.append(line)
                    began.set()
        except httpx.HTTPError as error:
            lines.append(type(error).__name__)

    thread = threading.Thread(target=read)
    thread.start()
    assert began.wait(10)
    return thread, lines, began


def test_sigterm_drains() -> None:
    """The requests under way end, others are refused, also one whose body comes only now, and the status is 0.

    Meanwhile, /health says that the server is ending, to new connections too.
    """
    process, url = start(drain_s=20)
    thread, lines, _ = stream(url, 120)
    body = json.dumps({"model": MODEL, "prompt": "the"}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: {len(body)}\r\n"
    address = ("127.0.0.1", httpx.URL(url).port)
    with httpx.Client(base_url=url) as idle, socket.create_connection(address, timeout=10) as begun:
        idle.get("/health")
        begun.sendall(f"{head}content-type: application/json\r\n\r\n".encode() + body[:9])
        time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        begun.sendall(body[9:])
        late = b"".join(iter(lambda: begun.recv(65536), b""))
        assert b" 503 " in late and b"the server is ending" in late, late
        for client in (httpx, idle):
            answer = client.get("/health" if client is idle else f"{url}/health")
            assert answer.status_code == 503 and "the server is ending" in answer.text
        assert httpx.post(f"{url}/v1/completions", json={"model": MODEL, "prompt": "the"}).status_code == 503
    assert not lines[-1].endswith("[DONE]")
    out, err = process.communicate(timeout=20)
    thread.join(10)
    assert lines[-2] == "data: [DONE]"
    assert process.returncode == 0, err
    assert out == "left 0\n"
    assert "finishing 1 sequence" in err and "Traceback" not in err


def test_a_drain_has_an_end_and_ctrl_c_says_so() -> None:
    """A request that lasts too long is cut off, which its client can tell; Ctrl-C ends with status 130."""
    process, url = start(drain_s=1)
    thread, lines, _ = stream(url, 4000)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    thread.join(10)
    assert lines[-1] in ("RemoteProtocolError", "ReadError") and "data: [DONE]" not in lines
    assert process.returncode == 130, err
    assert out == "left 0\n"
    assert "Traceback" not in err


def test_a_second_signal_ends_at_once() -> None:
    process, url = start(drain_s=60)
    thread, _, _ = stream(url, 4000)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    out, err = process.communicate(timeout=20)
    thread.join(10)
    assert time.monotonic() - began < 20  # far less than drain_s
    assert process.returncode == 0, err
    assert out == "left 0\n" and "Traceback" not in err


@pytest.mark.parametrize("busy", [False, True])
def test_an_engine_that_ends(busy: bool) -> None:
    """Requests under way say so, /health does too, and the server ends with the engine's error."""
    with served(FakeEngine(tick_s=0.01), watch_s=0.1, engine_error_s=2.0) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        ask = {"model": MODEL, "prompt": "the", "max_tokens": 4000, "extra_body": {"ignore_eos": True}}
        if busy:
            pieces = client.completions.create(**ask, stream=True)
            next(iter(pieces))
            whole: list[int] = []
            body = {"model": MODEL, "prompt": "the", "max_tokens": 4000, "ignore_eos": True}
            thread = threading.Thread(
                target=lambda: whole.append(server.http.post("/v1/completions", json=body).status_code)
            )
            thread.start()
            until(lambda: server.engine.num_left == 2)
        server.engine.fail(LOST)
        if busy:
            with pytest.raises(openai.APIError, match="rank 1 was lost"):
                list(pieces)
            thread.join(10)
            assert whole == [500]
        until(lambda: server.http.get("/health").status_code == 503)
        assert "rank 1 was lost" in server.http.get("/health").json()["error"]["message"]
        with pytest.raises(openai.InternalServerError, match="rank 1 was lost"):
            client.completions.create(**ask)
        assert server.ended.wait(10)
        assert server.state.engine_error is LOST
        assert server.state.num_sequences == 0


def test_the_engines_error_is_the_servers() -> None:
    engine = FakeEngine()
    engine.fail(LOST)
    with run.bind("127.0.0.1", 0) as bound, pytest.raises(RankLostError, match="rank 1 was lost"):
        run.serve(engine, run.ServerConfig(MODEL, watch_s=0.1, engine_error_s=0.1), bound)
    engine.close()


def test_wrong_addresses() -> None:
    with run.bind("127.0.0.1", 0) as bound:
        port = bound.getsockname()[1]
        with pytest.raises(UsageError, match=f"cannot listen on 127.0.0.1 port {port} .*give another"):
            run.bind("127.0.0.1", port)
    for host in ("no.such.host.invalid", "300.1.1.1", "a" * 300, "\udcff"):
        with pytest.raises(UsageError, match="--host"):
            run.bind(host, 0)
    with pytest.raises(UsageError, match=r"cannot listen on 192\.0\.2\.1"):
        run.bind("192.0.2.1", 0)
    if socket.has_ipv6 and Path("/proc/net/if_inet6").exists():
        with run.bind("::1", 0) as bound:
            assert bound.family == socket.AF_INET6
