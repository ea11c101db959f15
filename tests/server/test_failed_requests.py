"""A request that fails alone, as one whose constraint fails: an error of OpenAI's form, while the engine serves the others."""

from __future__ import annotations

import json
from collections.abc import Iterator

import openai
import pytest
from support.served import MODEL, Served, served

LINE = "the constraint failed: ValueError: no such way"


@pytest.fixture
def server() -> Iterator[Served]:
    with served() as running:
        running.engine.fails_behind = 3
        yield running
        running.settled()


def test_a_whole_answer(server: Served) -> None:
    """Status 500, also if one of several completions fails. Others are cancelled, and the next request is served."""
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.InternalServerError, match=LINE) as raised:
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "Hi"}], n=2)
    assert raised.value.body == {"message": LINE, "type": "server_error", "param": None, "code": "request_failed"}
    with pytest.raises(openai.InternalServerError, match=LINE):
        client.responses.create(model=MODEL, input="Hi")
    server.engine.fails_behind = None
    assert client.completions.create(model=MODEL, prompt="the cat", max_tokens=5).choices[0].text
    assert server.http.get("/health").status_code == 200
    metrics = server.http.get("/metrics").text
    assert 'finished_reason="error"' in metrics


def test_a_stream(server: Served) -> None:
    """The tokens before it, then the error."""
    body = {"model": MODEL, "prompt": "the cat", "max_tokens": 50, "ignore_eos": True, "stream": True}
    lines = server.http.post("/v1/completions", json=body).text.split("\n\n")
    *tokens, error, done, _ = lines
    assert done == "data: [DONE]" and json.loads(error.removeprefix("data: "))["error"]["message"] == LINE
    assert len(tokens) <= 3
    assert all(json.loads(each.removeprefix("data: "))["choices"][0]["finish_reason"] is None for each in tokens)
