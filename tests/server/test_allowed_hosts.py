"""Names and web pages that a server answers to: no page of a stranger reaches it, by DNS rebinding or directly."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import httpx
import pytest
from support.served import MODEL, Served, served

ASK = {"model": MODEL, "prompt": "the", "max_tokens": 1}
PAGE = "https://chat.example.com"


@pytest.fixture(scope="module")
def opened() -> Iterator[Served]:
    """A server for some names and pages besides its own."""
    lists = {"allowed_hosts": ("llm.example.com", "*.lab.example.org"), "allowed_origins": (PAGE, "null")}
    with served(**lists) as running:
        yield running


def ask(server: Served, host: str, origin: str | None = None) -> httpx.Response:
    headers = {"host": host} | ({} if origin is None else {"origin": origin})
    return server.http.post("/v1/completions", json=ASK, headers=headers)


@pytest.mark.parametrize(
    ("host", "is_served"),
    [
        ("localhost", True),
        ("LOCALHOST:8000", True),
        ("localhost.", True),
        ("app.localhost:8000", True),
        ("127.0.0.1:8000", True),
        ("192.168.1.20", True),
        ("[::1]:8000", True),
        ("[fe80::1]", True),
        ("gpu-box:8000", True),  # in /etc/hosts, or a container's
        (socket.gethostname(), True),
        ("evil.com", False),
        ("evil.com:8000", False),
        ("EVIL.com.:8000", False),
        ("localhost.evil.com", False),
        ("127.0.0.1.nip.io:8000", False),
        ("evil.com:", False),
        ("[evil.com]:80", False),
        ("127.0.0.1@evil.com", False),
        ("llm.example.com", False),
    ],
)
def test_hosts(server: Served, host: str, is_served: bool) -> None:
    answer = ask(server, host)
    assert answer.status_code == (200 if is_served else 403), answer.text
    for path in ("/", "/health", "/stats", "/v1/models"):
        assert server.http.get(path, headers={"host": host}).status_code == (200 if is_served else 403)
    if not is_served:
        error = answer.json()["error"]
        assert error["code"] == "host_not_allowed" and "--allowed-hosts" in error["message"]


def test_one_of_several_hosts(server: Served) -> None:
    """A second Host counts as well; a client without one, which is no browser, is served."""
    for lines, status in ((b"host: localhost\r\nhost: evil.com\r\n", b"403"), (b"", b"200")):
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\n" + lines + b"connection: close\r\n\r\n")
            assert connection.recv(4096).split()[1] == status


def test_allowed_hosts(opened: Served) -> None:
    for host in (
        "llm.example.com:8000",
        "llm.example.com.",
        "a.lab.example.org",
        "A.b.LAB.example.org",
        "localhost",
        "10.0.0.1",
    ):
        assert ask(opened, host).status_code == 200
    for host in ("example.com", "lab.example.org", "evil.com", "xlab.example.org", "llm.example.com.evil.com"):
        assert ask(opened, host).status_code == 403
    with served(allowed_hosts=("*",)) as any_host:
        assert ask(any_host, "evil.com").status_code == 200


def test_a_key_opens_what_has_one() -> None:
    """Strangers' pages have no key, so their names matter only to who asks for it."""
    key = {"authorization": "Bearer key"}
    for lists, status in (({}, 200), ({"allowed_hosts": ("llm.example.com",)}, 403)):
        with served(api_keys=("key",), **lists) as server:
            for more in ({"host": "other.example.com"}, {"host": "other.example.com", "origin": PAGE}):
                answer = server.http.get("/v1/models", headers=key | more)
                assert answer.status_code == status


@pytest.mark.parametrize(
    ("origin", "is_served"),
    [
        (None, True),
        ("http://localhost:8000", True),
        ("https://localhost:8000", True),  # behind a proxy that ends TLS
        ("http://localhost:9000", False),
        ("http://localhost", False),
        ("http://evil.com", False),
        ("http://localhost:8000.evil.com", False),
        ("null", False),
        ("", False),
        ("http://[", False),
    ],
)
def test_origins(server: Served, origin: str | None, is_served: bool) -> None:
    answer = ask(server, "localhost:8000", origin)
    assert answer.status_code == (200 if is_served else 403), answer.text
    assert "access-control-allow-origin" not in answer.headers
    if not is_served:
        error = answer.json()["error"]
        assert error["code"] == "origin_not_allowed" and "--allowed-origins" in error["message"]


def preflight(server: Served, origin: str, method: str = "POST") -> httpx.Response:
    asked = {"access-control-request-method": method, "access-control-request-headers": "authorization,content-type"}
    return server.http.options("/v1/chat/completions", headers={"origin": origin, **asked})


def test_cors(opened: Served) -> None:
    """Pages that are allowed get what browsers want, in answers and refusals; others get nothing."""
    for origin in (PAGE, "null"):
        before, answer = preflight(opened, origin), ask(opened, "localhost", origin)
        assert before.status_code == answer.status_code == 200
        assert "authorization" in before.headers["access-control-allow-headers"]
        assert "POST" in before.headers["access-control-allow-methods"]
        refused = opened.http.post("/v1/completions", json={}, headers={"origin": origin})
        assert refused.status_code == 400
        for each in (before, answer, refused):
            assert each.headers["access-control-allow-origin"] == origin
    assert preflight(opened, "http://evil.com").status_code == 400
    other = ask(opened, "localhost", "http://evil.com")
    assert other.status_code == 403 and "access-control-allow-origin" not in other.headers
    with served() as closed:
        assert "access-control-allow-origin" not in preflight(closed, PAGE).headers


def test_cors_with_keys_and_lists() -> None:
    options = {"allowed_methods": ("GET",), "allowed_headers": ("authorization",), "allow_credentials": True}
    with served(api_keys=("key",), allowed_origins=("*",), **options) as server:
        assert preflight(server, PAGE).status_code == 400  # POST, and a header, are not on the lists
        answer = server.http.get("/v1/models", headers={"origin": PAGE, "authorization": "Bearer key"})
        assert answer.status_code == 200 and answer.headers["access-control-allow-credentials"] == "true"
        without = server.http.get("/v1/models", headers={"origin": PAGE})
        assert without.status_code == 401 and without.headers["access-control-allow-origin"] == PAGE
