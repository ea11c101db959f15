"""Options of HTTP: TLS, a path in front, several names, and a chat template of the server's own."""

from __future__ import annotations

import argparse
import shutil
import socket
import ssl
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.served import MODEL, served
from support.tls import Certificate, make_certificate

from distmk.cli.serve_http import add_http_options, http_of
from distmk.errors import UsageError


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl command to make a certificate")
    return make_certificate(tmp_path_factory.mktemp("tls"))


def fields(*options: str) -> dict[str, Any]:
    """The fields of `ServerConfig` for options."""
    parser = argparse.ArgumentParser()
    add_http_options(parser)
    return http_of(parser.parse_args(options))


def test_https(certificate: Certificate) -> None:
    """Answers and streams by TLS, with the certificate checked; a header that is too large is refused as without TLS."""
    options = fields("--ssl-certfile", str(certificate.file), "--ssl-keyfile", str(certificate.key))
    with served(**options, max_header_bytes=4096) as server:
        context = ssl.create_default_context(cafile=str(certificate.file))
        with httpx.Client(base_url=f"https://127.0.0.1:{server.port}", verify=context, timeout=20) as http:
            body = {"model": MODEL, "prompt": "the cat", "max_tokens": 5, "ignore_eos": True}
            assert http.post("/v1/completions", json=body).json()["usage"]["completion_tokens"] == 5
            stream = http.post("/v1/completions", json={**body, "stream": True})
            assert stream.text.endswith("data: [DONE]\n\n")
            assert http.get("/health", headers={"x-large": "x" * 5000}).status_code == 431
        with pytest.raises(httpx.TransportError):
            httpx.get(f"http://127.0.0.1:{server.port}/health")
        with socket.create_connection(("127.0.0.1", server.port)) as plain:
            plain.sendall(b"nonsense")
        assert not server.ended.is_set()


def test_files_of_tls_that_do_not_fit(certificate: Certificate, tmp_path: Path) -> None:
    file, key, empty = str(certificate.file), str(certificate.key), tmp_path / "empty"
    empty.write_text("")
    for options, says in (
        (("--ssl-certfile", file), "go together"),
        (("--ssl-certfile", file, "--ssl-keyfile", str(tmp_path / "none")), "--ssl-keyfile"),
        (("--ssl-certfile", str(tmp_path), "--ssl-keyfile", key), "--ssl-certfile"),
        (("--ssl-certfile", file, "--ssl-keyfile", file), "with its key"),
        (("--ssl-certfile", str(empty), "--ssl-keyfile", key), "with its key"),
        (("--ssl-certfile", file, "--ssl-keyfile", str(certificate.encrypted_key)), "must not be encrypted"),
    ):
        with pytest.raises(UsageError, match=says) as caught:
            fields(*options)
        assert "\n" not in str(caught.value)


def test_a_path_in_front() -> None:
    """A proxy may take the path away or leave it. The page's files and what watches the server need no key either way."""
    with served(**fields("--root-path", "/llm/"), api_keys=("secret",)) as server, server.http as http:
        for front in ("", "/llm"):
            for path in ("/", "/health", "/stats"):
                assert http.get(front + path).status_code == 200
            assert http.get(f"{front}/v1/models").status_code == 401
            key = {"authorization": "Bearer secret"}
            assert http.get(f"{front}/v1/models", headers=key).json()["data"][0]["id"] == MODEL
        assert http.get("/openapi.json", headers=key).json()["servers"] == [{"url": "/llm"}]
    for wrong in ("llm", "/a//b", "/a b", "/llm?x"):
        with pytest.raises(UsageError, match="--root-path"):
            fields("--root-path", wrong)


def test_a_chat_template_of_the_server(tmp_path: Path) -> None:
    """It renders conversations that bring no template, and its format chooses the parsers."""
    file = tmp_path / "template.jinja"
    file.write_text("own <think> </think>\n{{ messages }}")
    with served(**fields("--chat-template", str(file)), trust_request_chat_template=True) as server:
        server.engine.says = "<think>\nWhy\n</think>\n\nHello."
        messages = [{"role": "user", "content": "hello"}]

        def asked() -> str:
            text: str = server.engine.tokenizer.decode(server.engine.prompts[-1])
            return text

        answer = server.http.post("/v1/chat/completions", json={"model": MODEL, "messages": messages}).json()
        assert answer["choices"][0]["message"]["reasoning_content"] == "Why"
        assert asked().startswith("own <think>")
        server.http.post("/v1/responses", json={"model": MODEL, "input": "hello"})
        assert asked().startswith("own <think>")
        tokens = server.http.post("/tokenize", json={"messages": messages}).json()["tokens"]
        assert server.engine.tokenizer.decode(tokens) == asked()
        server.http.post("/v1/chat/completions", json={"model": MODEL, "messages": messages, "chat_template": "other "})
        assert asked().startswith("other user")


def test_what_is_no_template(tmp_path: Path) -> None:
    damaged, binary = tmp_path / "damaged.jinja", tmp_path / "binary"
    damaged.write_text("{% if %}")
    binary.write_bytes(b"\xff\xfe")
    large = tmp_path / "large"
    large.write_text("x" * (1 << 19))
    assert fields("--chat-template", "{{ messages }}")["chat_template"] == "{{ messages }}"
    for given, says in (
        ("nowhere.jinja", "neither a file nor a template"),
        ("", "neither a file nor a template"),
        ("{% if %}", "no chat template at line 1"),
        (str(damaged), "damaged.jinja.* is no chat template"),
        (str(binary), "not UTF-8"),
        (str(tmp_path), "folder"),
        (str(large), "at most 256 KiB"),
        ("{" * (1 << 19), "at most 256 Ki"),
    ):
        with pytest.raises(UsageError, match=says) as caught:
            fields("--chat-template", given)
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_several_names() -> None:
    with served(other_model_names=("alias",)) as server:
        body = {"prompt": "the", "max_tokens": 2}
        for name in (MODEL, "alias"):
            assert server.http.post("/v1/completions", json={"model": name, **body}).json()["model"] == MODEL
        assert [each["id"] for each in server.http.get("/v1/models").json()["data"]] == [MODEL, "alias"]
