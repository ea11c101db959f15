"""Parameters that the server does not have: values that ask for nothing change nothing, others are one line."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types import completion_create_params as completion_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params as response_params
from support.served import MODEL, Served

from distmk.api.absent_arguments import REQUEST
from distmk.server.bodies import ChatCompletionBody, CompletionBody
from distmk.server.responses_body import ResponsesBody

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PROMPTS: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hello"}]},
    COMPLETIONS: {"prompt": "the"},
}
TOOLS = [{"type": "function", "function": {"name": "f"}}]
NEUTRAL: list[dict[str, Any]] = [
    {"bad_words": [], "length_penalty": 1.0, "early_stopping": False, "use_beam_search": False, "best_of": 1},
    {"echo": False, "priority": 0, "suffix": "", "logits_processors": None, "allowed_token_ids": None},
    {"tools": TOOLS, "tool_choice": "none", "parallel_tool_calls": False},
    {"functions": TOOLS, "function_call": "none"},
    {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True, "response_format": {"type": "text"}},
    {"prompt_cache_key": "k", "safety_identifier": "s", "user": "u", "metadata": {"a": "b"}, "request_id": "r"},
    {"store": False, "service_tier": "auto", "modalities": ["text"], "verbosity": "medium", "prediction": None},
    {"service_tier": "default", "stream_options": None, "guided_json": None, "structured_outputs": None},
    {"spaces_between_special_tokens": True, "skip_special_tokens": True, "mm_processor_kwargs": {}},
]
REFUSED: list[tuple[str, Any, str]] = [
    ("tools", TOOLS, "tool_choice"),
    ("tool_choice", {"type": "function", "function": {"name": "f"}}, "tools"),
    ("bad_words", ["a"], "logit_bias"),
    ("length_penalty", 2.0, "n completions"),
    ("structural_tag", {"type": "json_object"}, "structured_outputs"),
    ("priority", 3, "order in which they come"),
    ("store", True, "not stored"),
]


def answer(server: Served, path: str, status: int, body: dict[str, Any]) -> dict[str, Any]:
    base = {"model": MODEL, "max_tokens": 12, "seed": 5, **PROMPTS[path]}
    found = server.http.post(path, json=base | body)
    assert found.status_code == status, found.text
    made: dict[str, Any] = found.json()
    return made


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("body", NEUTRAL, ids=lambda body: next(iter(body)))
def test_what_asks_for_nothing_changes_nothing(server: Served, path: str, body: dict[str, Any]) -> None:
    plain, made = answer(server, path, 200, {}), answer(server, path, 200, body)
    assert made["choices"] == plain["choices"] and made["usage"] == plain["usage"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(("name", "value", "says"), REFUSED, ids=[name for name, *_ in REFUSED])
def test_what_asks_for_something_is_told_what_exists(
    server: Served, path: str, name: str, value: Any, says: str
) -> None:
    error = answer(server, path, 400, {name: value})["error"]
    assert error["param"] == name and error["message"].startswith(f"{name} is ") and says in error["message"]
    assert "\n" not in error["message"] and len(error["message"]) < 300


@pytest.mark.parametrize(
    ("params", "body"),
    [
        (chat_params.CompletionCreateParamsBase, ChatCompletionBody),
        (completion_params.CompletionCreateParamsBase, CompletionBody),
        (response_params.ResponseCreateParamsBase, ResponsesBody),
    ],
)
def test_parameters_of_the_openai_client_are_known(params: Any, body: Any) -> None:
    names = params.__annotations__
    unknown = [name for name in names if name not in body.model_fields and name not in REQUEST]
    assert len(names) > 15 and len(unknown) < 3, unknown  # a newer client may have a few more
