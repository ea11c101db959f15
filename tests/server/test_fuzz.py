"""Requests with any values at all: each is answered or refused with a parameter's name, none is a bug of the server."""

from __future__ import annotations

import json
import os
import random
from typing import Any

from support.served import MODEL, Served

from distmk.server.bodies import ChatCompletionBody, CompletionBody, DetokenizeBody, TokenizeBody
from distmk.server.responses_body import ResponsesBody

PATHS = {
    "/v1/completions": (CompletionBody, {"model": MODEL, "prompt": "the cat", "max_tokens": 3}),
    "/v1/chat/completions": (
        ChatCompletionBody,
        {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3},
    ),
    "/v1/responses": (ResponsesBody, {"model": MODEL, "input": "hi", "max_output_tokens": 3}),
    "/tokenize": (TokenizeBody, {"prompt": "the cat"}),
    "/detokenize": (DetokenizeBody, {"tokens": [1, 2]}),
}
SIMPLE = (
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    20,
    10**9,
    2**63,
    10**25,
    -(10**25),
    0.5,
    -0.0,
    1e308,
    "",
    "a",
    "é\ud800",
    "\x00",
)
NAMES = (
    "role",
    "content",
    "type",
    "text",
    "format",
    "effort",
    "output",
    "user",
    "include_usage",
    "1",
    "prompt",
    "no_such_name",
)


def value(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.random()
    if depth > 3 or kind < 0.6:
        return rng.choice(SIMPLE)
    count = rng.randrange(4)
    if kind < 0.8:
        return [value(rng, depth + 1) for _ in range(count)]
    return {rng.choice(NAMES): value(rng, depth + 1) for _ in range(count)}


def test_any_values(server: Served) -> None:
    seed = int(os.environ.get("DISTMK_TEST_SEED") or random.randrange(2**32))
    print(f"repeat with DISTMK_TEST_SEED={seed}")
    rng = random.Random(seed)
    statuses: dict[int, int] = {}
    with server.http as http:
        for _ in range(600):
            path, (kind, base) = rng.choice(list(PATHS.items()))
            body = dict(base)
            for _ in range(rng.randrange(1, 4)):
                body[rng.choice([*kind.model_fields, "no_such_name"])] = value(rng)
            text = json.dumps(body)
            answer = http.post(path, content=text, headers={"content-type": "application/json"})
            statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1
            assert answer.status_code in (200, 400, 404), (path, text, answer.text)
            if answer.status_code != 200:
                error = answer.json()["error"]
                assert error["message"] and len(error["message"]) < 500, (path, text, answer.text)
                is_json = "\\ud800" not in text  # half of a pair of surrogates
                assert error["param"] is not None or not is_json, (path, text, answer.text)
            elif answer.headers["content-type"].startswith("text/event-stream"):
                end = answer.text.split("\n\n")[-2]
                whole = end.startswith("event: response.") if path == "/v1/responses" else end == "data: [DONE]"
                assert whole, (path, text, answer.text)
    assert statuses[200] > 3 and statuses[400] > 200
    server.settled()
