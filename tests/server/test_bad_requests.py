"""What is wrong in a request is said by name, in OpenAI's form, and costs nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.fake_engine import FakeEngine
from support.served import MODEL, Served, served

HELLO = [{"role": "user", "content": "hello"}]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def refusal(server: Served, path: str, status: int = 400, **body: Any) -> tuple[str | None, str]:
    """The parameter and the message of a refusal."""
    base = {"max_tokens": 16, **({"messages": HELLO} if path == CHAT else {"prompt": "the"})}
    answer = server.http.post(path, json={"model": MODEL, **base, **body})
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "\n" not in error["message"]
    return error["param"], error["message"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1),
        ("top_p", 0),
        ("top_k", -2),
        ("min_p", 2),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -3),
        ("repetition_penalty", 0),
        ("n", 0),
        ("min_tokens", 50),
        ("seed", 2**64),
        ("logit_bias", {"5": 1000}),
        ("prompt_logprobs", 21),
        ("temperature", "hot"),
        ("temperature", True),
        ("max_tokens", 0),
        ("max_tokens", -5),
        ("max_tokens", 5000),
        ("max_tokens", 1.5),
        ("max_tokens", "many"),
        ("n", "two"),
        ("stop", 5),
        ("stop", [1]),
        ("stream", "yes"),
        ("seed", "x"),
        ("logit_bias", {"x": 1}),
        ("logit_bias", [1]),
        ("stop_token_ids", ["a"]),
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("tool_choice", "required"),
        ("response_format", {"type": "xml"}),
        ("best_of", 3),
        ("no_such_parameter", 1),
        ("stream_options", {"include_usages": True}),
        ("stream_options", {"include_usage": True}),
        ("stop", [""]),
        ("stop", ["a"] * 65),
        ("stop", ["a" * 5000]),
        ("logit_bias", {"1": "a"}),
        ("prompt_logprobs", "all"),
    ],
)
def test_a_wrong_parameter_is_named(server: Served, path: str, name: str, value: Any) -> None:
    param, message = refusal(server, path, **{name: value})
    assert param is not None and param.split(".")[0] == name
    assert name in message


@pytest.mark.parametrize(
    ("path", "name", "value"),
    [
        (COMPLETIONS, "model", None),
        (CHAT, "model", None),
        (CHAT, "model", 5),
        (COMPLETIONS, "prompt", None),
        (COMPLETIONS, "prompt", []),
        (COMPLETIONS, "prompt", ""),
        (COMPLETIONS, "prompt", [""]),
        (COMPLETIONS, "prompt", ["a", 1]),
        (COMPLETIONS, "prompt", [[1], "a", []]),
        (COMPLETIONS, "prompt", [-1]),
        (COMPLETIONS, "prompt", [10**6]),
        (COMPLETIONS, "prompt", [1.5]),
        (COMPLETIONS, "prompt", 7),
        (COMPLETIONS, "prompt", "the " * 5000),
        (COMPLETIONS, "echo", 3),
        (COMPLETIONS, "suffix", "end"),
        (CHAT, "messages", None),
        (CHAT, "messages", []),
        (CHAT, "messages", "hello"),
        (CHAT, "messages", [{"role": "user"}]),
        (CHAT, "messages", [{"role": "robot", "content": "a"}]),
        (CHAT, "messages", [{"role": "user", "content": 5}]),
        (CHAT, "messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
        (CHAT, "messages", [{"role": "tool", "tool_call_id": "b"}]),
        (CHAT, "messages", [{"role": "user", "content": "refuse me"}]),
        (CHAT, "messages", [{"role": "user", "content": "the " * 5000}]),
        (CHAT, "max_completion_tokens", 0),
        (CHAT, "max_completion_tokens", 5000),
        (CHAT, "top_logprobs", 3),
        (COMPLETIONS, "logprobs", 21),
        (CHAT, "chat_template_kwargs", {"no_such_option": 1}),
    ],
)
def test_a_wrong_prompt_is_named(server: Served, path: str, name: str, value: Any) -> None:
    param, message = refusal(server, path, **{name: value})
    assert param is not None and param.split(".")[0] == name, (param, message)
    assert len(message) < 400


def test_top_logprobs_go_by_their_own_name(server: Served) -> None:
    param, message = refusal(server, CHAT, logprobs=True, top_logprobs=21)
    assert param == "top_logprobs" and message.startswith("top_logprobs is 21; expected 0 to 20")


def test_one_request_may_not_have_more_sequences_than_fit() -> None:
    with served(FakeEngine(max_num_seqs=2), max_queue=2) as server:
        assert refusal(server, COMPLETIONS, prompt=["a"] * 5)[0] == "n"
        assert refusal(server, COMPLETIONS, n=10**9)[0] == refusal(server, COMPLETIONS, n=10)[0] == "n"
        assert server.engine.num_submitted == 0


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"nonsense",
        b"[]",
        b'"text"',
        b"null",
        b"\xff\xfe",
        b'{"model": "fake", "prompt": "a", "temperature": NaN}',
        b'{"model": "fake", "prompt": "a", "temperature": 1e999}',
        b'{"model": "fake", "prompt": "\\ud800"}',
        b'{"model": "fake", "prompt": "a", "seed": ' + b"9" * 10_000 + b"}",
        b'{"prompt": ' + b"[" * 1_000_000 + b"]" * 1_000_000 + b"}",
        b'{"a":' * 300_000 + b"1" + b"}" * 300_000,
        b'{"prompt": ' + b"[" * 30_000 + b"]" * 30_000 + b"}",
        b"[" * 1_000_000,
    ],
    ids=lambda body: body[:20].decode(errors="replace"),
)
def test_a_body_that_is_no_request(server: Served, body: bytes) -> None:
    """Also one that nests a million deep."""
    answer = server.http.post(COMPLETIONS, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]
    assert server.http.get("/health").status_code == 200


def test_a_body_without_its_type_is_refused(server: Served) -> None:
    """A web page elsewhere may send forms and plain text to this machine, but not JSON."""
    body = json.dumps({"prompt": "a"})
    for kind in ({"content-type": "text/plain"}, {"content-type": "application/x-www-form-urlencoded"}, {}):
        answer = server.http.post(COMPLETIONS, content=body, headers=kind)
        assert answer.status_code == 400
        assert "application/json" in answer.json()["error"]["message"]


def test_unknown_paths(server: Served) -> None:
    answer = server.http.get("/v1/embeddings")
    assert answer.status_code == 404 and "/v1/embeddings" in answer.json()["error"]["message"]
    assert server.http.get(CHAT).status_code == 405


def test_keys() -> None:
    with served(api_keys=("first key", "zweiter Schlüssel")) as server:
        http = server.http
        for headers in (
            {},
            {"authorization": "Bearer wrong"},
            {"authorization": "first key"},
            {"authorization": "Bearer"},
        ):
            for path in ("/v1/models", "/v1/completions", "/tokenize", "/openapi.json"):
                answer = http.get(path, headers=headers)
                assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
        assert http.get("/v1/models", headers={"authorization": "Bearer first key"}).status_code == 200
        for encoding in ("utf-8", "latin-1"):
            headers = {"authorization": "bearer zweiter Schlüssel".encode(encoding)}
            assert http.get("/v1/models", headers=headers).status_code == 200
        for path in ("/", "/health", "/metrics", "/stats"):
            assert http.get(path).status_code == 200
        assert MODEL in http.get("/stats").text
