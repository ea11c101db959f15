"""/v1/completions through the openai client."""

from __future__ import annotations

import random
from typing import Any

import openai
import pytest
from support.served import MODEL, Served


@pytest.fixture(scope="module")
def client(server: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_a_prompt_is_encoded_once(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever asks for it: text, several texts, a conversation. An echo with log probabilities looks for offsets beside it."""
    encode, texts = server.engine.tokenizer.encode, list[str]()

    def noted(text: str, *given: Any, **options: Any) -> list[int]:
        texts.extend([text] if len(text) > 2 else [])  # the fake engine makes up characters
        return encode(text, *given, **options)

    monkeypatch.setattr(server.engine.tokenizer, "encode", noted)
    for prompt, extra in (
        ("the cat", {}),
        (["the cat", "a dog"], {"n": 3}),
        ("the cat", {"echo": True, "logprobs": 1}),
    ):
        texts.clear()
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 2, **extra}
        server.http.post("/v1/completions", json=body).raise_for_status()
        assert texts == ([prompt] if isinstance(prompt, str) else prompt)
    texts.clear()
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "the cat"}], "max_tokens": 2, "n": 2}
    server.http.post("/v1/chat/completions", json=chat).raise_for_status()
    assert len(texts) == 1


def test_all_forms_of_prompts(client: openai.OpenAI, server: Served) -> None:
    encode = server.engine.tokenizer.encode
    one, two = "the cat sat", "birds sing"
    settings = {"model": MODEL, "temperature": 0, "max_tokens": 12}
    text = client.completions.create(prompt=one, **settings)
    ids = client.completions.create(prompt=encode(one), **settings)
    assert text.choices[0].text == ids.choices[0].text != ""
    assert text.usage is not None and text.usage.prompt_tokens == len(encode(one))
    assert text.usage.total_tokens == text.usage.prompt_tokens + text.usage.completion_tokens
    for both in ([one, two], [encode(one), encode(two)]):
        answer = client.completions.create(prompt=both, echo=True, **settings)
        assert [choice.index for choice in answer.choices] == [0, 1]
        assert answer.choices[0].text == one + text.choices[0].text
        assert answer.choices[1].text.startswith(two)
        assert answer.usage is not None and answer.usage.prompt_tokens == len(encode(one)) + len(encode(two))


def test_the_default_is_16_tokens(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="a", extra_body={"ignore_eos": True})
    assert answer.usage is not None and answer.usage.completion_tokens == 16
    assert answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("logprobs", [None, 0, 3])
def test_a_stream_says_what_the_whole_answer_says(client: openai.OpenAI, echo: bool, logprobs: int | None) -> None:
    settings = {"model": MODEL, "prompt": ["the cat", "é漢"], "n": 2, "seed": 5, "max_tokens": 40, "echo": echo}
    extra = {"extra_body": {"return_token_ids": True}}
    whole = client.completions.create(logprobs=logprobs, **settings, **extra)
    texts, ids, reasons, tokens, offsets = {}, {}, {}, {}, {}
    usage = None
    stream = client.completions.create(
        logprobs=logprobs, stream=True, stream_options={"include_usage": True}, **settings, **extra
    )
    for piece in stream:
        usage = piece.usage
        for choice in piece.choices:
            assert "\ufffd" not in choice.text, "half a character"
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            ids[choice.index] = ids.get(choice.index, []) + choice.token_ids
            reasons[choice.index] = choice.finish_reason
            if choice.logprobs is not None:
                tokens[choice.index] = tokens.get(choice.index, []) + choice.logprobs.tokens
                offsets[choice.index] = offsets.get(choice.index, []) + choice.logprobs.text_offset
    assert len(whole.choices) == 4
    for choice in whole.choices:
        assert choice.text == texts[choice.index]
        assert choice.token_ids == ids[choice.index]
        assert choice.finish_reason == reasons[choice.index]
        if logprobs is None:
            assert choice.logprobs is None
        else:
            assert choice.logprobs is not None
            assert choice.logprobs.tokens == tokens[choice.index]
            assert choice.logprobs.text_offset == offsets[choice.index]
            found = choice.logprobs
            for token, top in list(zip(found.tokens or [], found.top_logprobs or [], strict=True))[int(echo) :]:
                assert len(top) == max(1, logprobs) or (len(top) == logprobs + 1 and min(top.values()) == top[token])
            assert (choice.logprobs.token_logprobs[0] is None) == echo
    assert usage == whole.usage
    first, second = whole.choices[0], whole.choices[1]
    assert first.text != second.text, "completions of one prompt have seeds of their own"


def test_only_the_prompts_log_probabilities(client: openai.OpenAI) -> None:
    """As evaluation harnesses ask: nothing is generated that the answer shows."""
    answer = client.completions.create(model=MODEL, prompt="the cat", max_tokens=0, echo=True, logprobs=1)
    choice = answer.choices[0]
    assert choice.text == "the cat"
    assert choice.logprobs is not None and choice.logprobs.tokens == ["t", "h", "e", " cat"]
    assert choice.logprobs.text_offset == [0, 1, 2, 3] and choice.finish_reason == "length"
    assert answer.usage is not None and (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (4, 0)
    settings = {"model": MODEL, "prompt": "the cat", "max_tokens": 0, "echo": True, "stream": True}
    *pieces, last = client.completions.create(
        **settings, stream_options={"include_usage": True}, extra_body={"return_token_ids": True, "stop": ["a"]}
    )
    assert [piece.choices[0].text for piece in pieces] == ["the cat"] and pieces[0].choices[0].token_ids == []
    assert pieces[0].choices[0].finish_reason == "length"
    assert last.usage is not None and last.usage.completion_tokens == 0


def test_prompt_logprobs(client: openai.OpenAI, server: Served) -> None:
    """vLLM's: of every position but the first, by token id, of both endpoints."""
    ids = server.engine.tokenizer.encode("the cat")
    answer = client.completions.create(model=MODEL, prompt="the cat", max_tokens=1, extra_body={"prompt_logprobs": 1})
    found = answer.choices[0].prompt_logprobs
    assert found[0] is None and [list(each) for each in found[1:]] == [[str(token_id)] for token_id in ids[1:]]
    assert found[1][str(ids[1])] == {"logprob": -0.5, "rank": 1, "decoded_token": "h"}
    chat = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "a"}], max_tokens=1, extra_body={"prompt_logprobs": 0}
    )
    assert chat.usage is not None and len(chat.prompt_logprobs) == chat.usage.prompt_tokens


def test_stop_strings(client: openai.OpenAI, server: Served) -> None:
    """Wherever they are cut, and with the request cancelled: the engine generates no more than a few tokens behind one."""
    rng = random.Random(3)
    for include in (False, True):
        settings = {"model": MODEL, "prompt": "the", "temperature": 0, "max_tokens": 2000}
        extra = {"ignore_eos": True}
        whole = client.completions.create(**settings, extra_body=extra).choices[0].text
        for _ in range(5):
            begin = rng.randrange(50, 400)
            stop = [whole[begin : begin + rng.randrange(2, 12)], "never met"]
            end = whole.index(stop[0])
            want = whole[: end + len(stop[0])] if include else whole[:end]
            extra = {"ignore_eos": True, "include_stop_str_in_output": include}
            answer = client.completions.create(**settings, stop=stop, extra_body=extra)
            assert (answer.choices[0].text, answer.choices[0].finish_reason) == (want, "stop")
            pieces = client.completions.create(**settings, stop=stop, stream=True, extra_body=extra)
            assert "".join(piece.choices[0].text for piece in pieces) == want
            assert answer.usage is not None and answer.usage.completion_tokens < 500
    server.settled()


def test_parameters_reach_the_engine(client: openai.OpenAI, server: Served) -> None:
    given = {
        "temperature": 0.5,
        "top_p": 0.9,
        "n": 1,
        "seed": 7,
        "stop": ["xyz"],
        "presence_penalty": 0.25,
        "frequency_penalty": -0.25,
    }
    extra = {
        "top_k": 5,
        "min_p": 0.125,
        "repetition_penalty": 1.5,
        "stop_token_ids": [3, 4],
        "min_tokens": 2,
        "ignore_eos": True,
        "logit_bias": {"12": -100},
    }
    client.completions.create(model=MODEL, prompt="a", max_tokens=3, user="someone", **given, extra_body=extra)
    params = server.engine.params[-1]
    for name, value in {**given, **extra, "logit_bias": {12: -100}, "max_tokens": 3}.items():
        assert getattr(params, name) == value, name
    client.completions.create(model=MODEL, prompt="a", max_tokens=1, stop="one", temperature=None, logit_bias=None)
    params = server.engine.params[-1]
    assert list(params.stop) == ["one"] and params.temperature == 1.0 and params.logit_bias is None
