"""/v1/chat/completions, models, /tokenize and /detokenize through the openai client."""

from __future__ import annotations

import asyncio
import json

import openai
import pytest
from support.served import MODEL, Served, served

HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def client(server: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_messages(client: openai.OpenAI, server: Served) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "the"}, {"type": "text", "text": "cat"}]},
        {"role": "assistant", "content": "sat"},
        {"role": "user", "content": "where"},
    ]
    answer = client.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_completion_tokens=20)
    text = "system: Be brief.\nuser: the\ncat\nassistant: sat\nuser: where\nassistant:"
    same = client.completions.create(model=MODEL, prompt=text, temperature=0, max_tokens=20)
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == same.choices[0].text
    assert answer.usage == same.usage


def test_without_a_limit_it_may_fill_the_context(client: openai.OpenAI, server: Served) -> None:
    client.chat.completions.create(model=MODEL, messages=HELLO)
    assert server.engine.params[-1].max_tokens is None


def test_usage_has_the_tokens_that_were_cached(client: openai.OpenAI, server: Served) -> None:
    """Of each prompt once, whatever n is."""
    server.engine.num_cached_tokens = 3
    chat = client.chat.completions.create(model=MODEL, messages=HELLO, n=2, max_tokens=2).usage
    text = client.completions.create(model=MODEL, prompt=["the cat sat on", "the mat and a dog"], max_tokens=2).usage
    server.engine.num_cached_tokens = 0
    for usage, cached in ((chat, 3), (text, 6)):
        assert usage is not None and usage.prompt_tokens_details is not None
        assert usage.prompt_tokens_details.cached_tokens == cached


@pytest.mark.parametrize("top", [None, 0, 2])
def test_a_stream_says_what_the_whole_answer_says(client: openai.OpenAI, top: int | None) -> None:
    settings = {"model": MODEL, "messages": HELLO, "n": 3, "seed": 2, "max_tokens": 50}
    if top is not None:
        settings |= {"logprobs": True, "top_logprobs": top}
    whole = client.chat.completions.create(**settings)
    texts, reasons, logprobs, usage = {}, {}, {}, None
    for piece in client.chat.completions.create(**settings, stream=True, stream_options={"include_usage": True}):
        assert piece.object == "chat.completion.chunk"
        usage = piece.usage
        for choice in piece.choices:
            if choice.index not in texts:
                assert choice.delta.role == "assistant"
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
            reasons[choice.index] = choice.finish_reason
            if choice.logprobs is not None:
                logprobs.setdefault(choice.index, []).extend(choice.logprobs.content or [])
    assert usage == whole.usage and usage is not None
    for choice in whole.choices:
        assert choice.message.content == texts[choice.index]
        assert choice.finish_reason == reasons[choice.index]
        if top is not None:
            assert choice.logprobs is not None and choice.logprobs.content == logprobs[choice.index]
            assert all(len(entry.top_logprobs) == top for entry in logprobs[choice.index])
            spelled = b"".join(bytes(entry.bytes or []) for entry in logprobs[choice.index] if "<|" not in entry.token)
            assert spelled.decode(errors="ignore").startswith(choice.message.content or "")
        else:
            assert choice.logprobs is None


def test_many_at_once(server: Served) -> None:
    """Each gets its own answer, whole."""

    async def ask() -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:

            async def one(number: int) -> None:
                settings = {"model": MODEL, "messages": HELLO, "seed": number % 8, "max_tokens": 30}
                whole = await client.chat.completions.create(**settings)
                stream = await client.chat.completions.create(**settings, stream=True)
                texts = [piece.choices[0].delta.content or "" async for piece in stream]
                assert "".join(texts) == whole.choices[0].message.content
                found.setdefault(number % 8, set()).add("".join(texts))

            found: dict[int, set[str]] = {}
            await asyncio.gather(*(one(number) for number in range(40)))
            assert all(len(texts) == 1 for texts in found.values())
            assert len(set.union(*found.values())) == 8

    asyncio.run(ask())


def test_models(client: openai.OpenAI, server: Served) -> None:
    (model,) = client.models.list().data
    assert model.id == MODEL and model.max_model_len == server.engine.max_model_len
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError, match="'other' is not served here"):
        client.models.retrieve("other")
    with pytest.raises(openai.NotFoundError, match="'other' is not served here"):
        client.chat.completions.create(model="other", messages=HELLO)


def test_tokenize_and_detokenize(server: Served) -> None:
    http, tokenizer = server.http, server.engine.tokenizer
    for text in ("the cat 漢", "", "birds sing " * 2000):
        answer = http.post("/tokenize", json={"model": MODEL, "prompt": text, "return_token_strs": True}).json()
        assert answer["tokens"] == tokenizer.encode(text) and answer["count"] == len(answer["tokens"])
        assert answer["max_model_len"] == server.engine.max_model_len
        assert len(answer["token_strs"]) == answer["count"]
        assert http.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": text}
    answer = http.post("/tokenize", json={"messages": HELLO}).json()
    assert answer["tokens"] == server.engine.render_chat(HELLO)
    assert http.post("/tokenize", json={}).status_code == 400
    for beyond in (-1, 100_000, 2**32, 10**25):
        refused = http.post("/detokenize", json={"tokens": [1, beyond]})
        assert refused.status_code == 400 and refused.json()["error"]["param"].startswith("tokens"), refused.text
        assert "2**" in refused.text or str(beyond) in refused.text


def test_how_messages_become_a_prompt(server: Served) -> None:
    """vLLM's parameters, of both endpoints that take messages; templates only where the server trusts them."""
    messages = [*HELLO, {"role": "assistant", "content": "the cat"}]
    open_end = {"add_generation_prompt": False, "continue_final_message": True}
    for options, text in (
        ({}, "user: hello\nassistant: the cat\nassistant:"),
        ({"add_generation_prompt": False}, "user: hello\nassistant: the cat\n"),
        (open_end, "user: hello\nassistant: the cat"),
    ):
        ids = server.engine.tokenizer.encode(text)
        tokenized = server.http.post("/tokenize", json={"messages": messages, **options}).json()
        assert tokenized["tokens"] == ids
        body = {"model": MODEL, "messages": messages, "max_tokens": 1, **options}
        assert server.http.post("/v1/chat/completions", json=body).status_code == 200
        assert server.engine.prompts[-1] == ids
    own = {"model": MODEL, "messages": messages, "max_tokens": 1, "chat_template": "on a mat"}
    for path in ("/v1/chat/completions", "/tokenize"):
        body = {name: own[name] for name in own if path != "/tokenize" or name != "max_tokens"}
        refused = server.http.post(path, json=body)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "chat_template"
        assert "--trust-request-chat-template" in refused.json()["error"]["message"]
        assert server.http.post(path, json={**body, "chat_template": None}).status_code == 200
    with served(trust_request_chat_template=True) as trusting:
        assert trusting.http.post("/v1/chat/completions", json=own).status_code == 200
        assert trusting.engine.tokenizer.decode(trusting.engine.prompts[-1]).startswith("on a mat")


@pytest.mark.parametrize("chat", [True, False])
def test_stop_reason(server: Served, chat: bool) -> None:
    """vLLM's: the stop string, or null; whole and in a stream, whose earlier pieces have null."""
    path, prompt = ("chat/completions", {"messages": HELLO}) if chat else ("completions", {"prompt": "hello"})
    body = {"model": MODEL, **prompt, "max_tokens": 900, "ignore_eos": True, "seed": 1}
    for more, want in (({"stop": ["zz", " mat"]}, " mat"), ({"max_tokens": 2}, None)):
        (choice,) = server.http.post(f"/v1/{path}", json={**body, **more}).json()["choices"]
        assert choice["stop_reason"] == want and choice["finish_reason"] == ("stop" if want else "length")
        lines = server.http.post(f"/v1/{path}", json={**body, **more, "stream": True}).text.split("\n\n")[:-2]
        pieces = [json.loads(line[6:])["choices"][0] for line in lines]
        assert [piece["stop_reason"] for piece in pieces] == [None] * (len(pieces) - 1) + [want]


def test_special_tokens_may_be_shown(client: openai.OpenAI) -> None:
    """skip_special_tokens: false shows them, an end token as well if stops are included, as in vLLM."""
    settings = {"model": MODEL, "messages": HELLO, "seed": 3, "max_tokens": 900}
    for extra, want in (
        ({}, ""),
        ({"skip_special_tokens": False}, ""),
        ({"skip_special_tokens": False, "include_stop_str_in_output": True}, "<|end|>"),
        ({"include_stop_str_in_output": True}, ""),
    ):
        (choice,) = client.chat.completions.create(**settings, extra_body=extra).choices
        text = choice.message.content or ""
        assert choice.finish_reason == "stop" and text.endswith(want) and ("<|end|>" in text) == bool(want), extra
    (choice,) = client.chat.completions.create(**settings, stop="<|end|>", extra_body={"ignore_eos": False}).choices
    assert choice.model_extra is not None and choice.model_extra["stop_reason"] == "<|end|>"
