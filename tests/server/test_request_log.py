"""The log: one line a request with its id, which the answer has too, and tracebacks for bugs of the server alone."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
from typing import Any

import httpx
import pytest
from support.fake_engine import FakeEngine, until
from support.helpers import ROOT
from support.served import MODEL, Served, served

from distmk.errors import RankLostError
from distmk.server import completions_endpoint

ASK = {"model": MODEL, "prompt": "the cat", "max_tokens": 5, "ignore_eos": True}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "ignore_eos": True}
FIELD = re.compile(r'(\w+)=("(?:[^"\\]|\\.)*"|\S+)')


@pytest.fixture(autouse=True)
def lines(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "distmk.server")
    return caplog


def record(lines: pytest.LogCaptureFixture, request_id: str, level: str = "INFO") -> tuple[str, dict[str, str]]:
    """What one line with an id says before its fields, and the fields. AssertionError: there is not one line."""

    def found() -> list[logging.LogRecord]:
        return [each for each in lines.records if f" id={request_id}" in each.getMessage()]

    until(lambda: bool(found()))
    (line,) = found()
    text = line.getMessage()
    assert line.levelname == level and "\n" not in text and line.exc_info is None
    return text.partition(" id=")[0], dict(FIELD.findall(text))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), [("/v1/completions", ASK), ("/v1/chat/completions", CHAT)])
def test_a_line_for_each_request(
    server: Served, lines: pytest.LogCaptureFixture, path: str, body: dict[str, Any], stream: bool
) -> None:
    more = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    answer = server.http.post(path, json={**body, **more, "n": 2}, headers={"x-request-id": "bad id"})
    request_id = answer.headers["x-request-id"]
    said, fields = record(lines, request_id)
    text = answer.text.splitlines()[-4].removeprefix("data: ") if stream else answer.text
    final = json.loads(text)
    assert re.fullmatch("[0-9a-f]{32}", request_id) and final["id"].endswith(f"-{request_id}")
    assert said == f"POST {path} 200"
    assert int(fields["prompt_tokens"]) == final["usage"]["prompt_tokens"]
    assert int(fields["output_tokens"]) == final["usage"]["completion_tokens"] == 10
    assert fields["finish_reason"] == "length" and "error" not in fields
    assert 0 < float(fields["first_token_ms"]) <= float(fields["total_ms"]) < 20_000


def test_the_clients_id(server: Served, lines: pytest.LogCaptureFixture) -> None:
    answer = server.http.post("/v1/completions", json=ASK, headers={"x-request-id": "trace-7:a.b_c"})
    assert answer.headers["x-request-id"] == "trace-7:a.b_c" and answer.json()["id"] == "cmpl-trace-7:a.b_c"
    record(lines, "trace-7:a.b_c")
    for wrong in ("a" * 129, 'a"b', "é"):
        answer = server.http.post("/v1/completions", json=ASK, headers={"x-request-id": wrong.encode()})
        assert re.fullmatch("[0-9a-f]{32}", answer.headers["x-request-id"])


def test_refusals_tell_why(lines: pytest.LogCaptureFixture) -> None:
    key = {"authorization": "Bearer key"}
    with served(api_keys=("key",), max_body_bytes=1000, allowed_hosts=("a.com",)) as server:
        for status, path, content, headers, says in (
            (400, "/v1/completions", json.dumps({**ASK, "top_p": 7}), key, "top_p is 7.0"),
            (400, "/v1/completions", json.dumps({**ASK, "x\n\x1b": 1}), key, "is not a parameter"),
            (400, "/v1/completions", "{", key, "not JSON"),
            (401, "/v1/completions", json.dumps(ASK), {}, "wrong or missing API key"),
            (403, "/v1/completions", json.dumps(ASK), {**key, "host": "evil.com"}, "evil.com"),
            (404, "/nothing%0aINFO", "", key, "there is no POST"),
            (404, "/v1/completions", json.dumps({**ASK, "model": "other"}), key, "not served here"),
            (413, "/v1/completions", "a" * 1001, key, "more than 1000 bytes"),
        ):
            kind = {"content-type": "application/json"}
            answer = server.http.post(path, content=content, headers=kind | headers)
            said, fields = record(lines, answer.headers["x-request-id"])
            assert answer.status_code == status and said == f"POST {path} {status}"
            assert says in json.loads(fields["error"], strict=True) and "key" not in fields
        assert "Bearer" not in lines.text.replace("Authorization: Bearer KEY", "")


def test_who_watches_is_not_logged(server: Served, lines: pytest.LogCaptureFixture) -> None:
    for path in ("/health", "/metrics", "/stats", "/", "/page/main.js"):
        assert server.http.get(path).status_code == 200
    record(lines, server.http.get("/v1/models").headers["x-request-id"])
    assert len(lines.records) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_bug(server: Served, lines: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    """Its traceback is logged with the id; one in the middle of a stream breaks the stream off."""

    def broken(*arguments: Any) -> Any:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(completions_endpoint._Answer, "pieces" if stream else "whole", broken)
    try:
        headers = {"x-request-id": f"bug-{stream}"}
        answer = server.http.post("/v1/completions", json={**ASK, "stream": stream}, headers=headers)
    except httpx.RemoteProtocolError:
        assert stream
    else:
        assert answer.status_code == 500 and not stream
        assert answer.json()["error"]["message"] == "a bug of the server: ZeroDivisionError"

    def ours() -> list[logging.LogRecord]:
        return [each for each in lines.records if each.name == "distmk.server"]

    until(lambda: len(ours()) == 2)
    bug, line = ours()
    assert bug.levelname == "ERROR" and bug.exc_info is not None and bug.exc_info[0] is ZeroDivisionError
    assert f"id=bug-{stream}" in bug.getMessage() and f"id=bug-{stream}" in line.getMessage()
    assert 'error="a bug of the server: ZeroDivisionError"' in line.getMessage()
    assert server.http.get("/health").status_code == 200


def test_an_engine_that_ends(lines: pytest.LogCaptureFixture) -> None:
    """A line without traceback for a stream under way, and for a request that comes after."""
    with served(FakeEngine(tick_s=0.01), watch_s=5) as server:
        body = {**ASK, "max_tokens": 4000, "stream": True}
        headers = {"x-request-id": "under-way"}
        with server.http.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
            events = answer.iter_lines()
            next(events)
            server.engine.fail(RankLostError("rank 1 was lost"))
            assert any("rank 1 was lost" in event for event in events)
        said, fields = record(lines, "under-way")
        assert said.endswith(" 200") and "rank 1 was lost" in fields["error"] and fields["finish_reason"] == "abort"
        assert server.http.post("/v1/completions", json=ASK, headers={"x-request-id": "after"}).status_code == 503
        said, fields = record(lines, "after", "ERROR")
        assert said.endswith(" 503") and "rank 1 was lost" in fields["error"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves(lines: pytest.LogCaptureFixture, stream: bool) -> None:
    with served(FakeEngine(tick_s=0.01)) as server:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(
                f"{server.url}/v1/completions",
                json={**ASK, "max_tokens": 4000, "stream": stream, "n": 2},
                headers={"x-request-id": "left"},
                timeout=httpx.Timeout(5, read=0.3 if not stream else 0.005),
            )
        said, fields = record(lines, "left")
        assert said.endswith("200" if stream else "499") and fields["finish_reason"] == "abort"


JOB = """
import sys
from support.fake_engine import FakeEngine
from distmk.server import run
from distmk.server.config import ServerConfig
bound = run.bind("127.0.0.1", 0)
print(bound.getsockname()[1], flush=True)
run.serve(FakeEngine(), ServerConfig("fake", log_level=sys.argv[1]), bound)
"""


@pytest.mark.whole
@pytest.mark.parametrize("level", ["info", "warning"])
def test_lines_on_stderr(level: str) -> None:
    """They come in order with time and level, and nobody has to read them: a full pipe holds up no request, and no end."""
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    command = [sys.executable, "-c", JOB, level]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
    assert process.stdout is not None
    port = int(process.stdout.readline())
    num_requests = 250 if level == "info" else 5
    long = {"model": "é" * 150}  # whose refusal names it: more than a pipe holds in all
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=10) as client:
        for _ in range(num_requests):
            assert client.post("/v1/completions", json=long).status_code == 404
    process.send_signal(signal.SIGTERM)
    if level == "info":
        process.wait(timeout=10)  # before anybody reads
    _, err = process.communicate(timeout=10)
    found = re.findall(
        r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} INFO POST /v1/completions 404 id=\w+ ", err, re.MULTILINE
    )
    assert process.returncode == 0 and "Traceback" not in err
    assert 100 < len(found) <= num_requests if level == "info" else not found


def test_no_stranger_writes_a_line(server: Served, lines: pytest.LogCaptureFixture) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(
            b"GET /\xc2\x85\x1b[2J%0d%0aINFO?key=secret HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n"
        )
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    if b" 404 " in answer:  # the parser may refuse it before
        until(lambda: len(lines.records) == 1)
    for each in lines.records:
        assert each.getMessage().isprintable() and "secret" not in each.getMessage()
