"""Every endpoint through the openai client, with a real engine behind it: its answers are what the engine says offline."""

from __future__ import annotations

import string
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from support.chat_model import write_chat_model
from support.chat_templates import CHATML
from support.fake_engine import until
from support.served import MODEL, Served, served

import distmk
from distmk import LLM, SamplingParams

pytestmark = pytest.mark.timeout(120)
PROMPT = "Once upon a time"
MESSAGES: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello é漢🙂"}]
# A token of this model is a byte. Those of words make a text of any bytes, which can be cut anywhere.
WORDS = {ord(letter): 20.0 for letter in string.ascii_lowercase}
BIAS: dict[str, Any] = {"logit_bias": {str(token): bias for token, bias in WORDS.items()}}
EXTRA = {"extra_body": {"ignore_eos": True, "return_token_ids": True}}
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 24, **BIAS, **EXTRA}
DRAWN: dict[str, Any] = {"model": MODEL, "temperature": 5, "max_tokens": 12, "seed": 11, **BIAS, **EXTRA}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Overrides the one of the fake engine."""
    model = write_chat_model(tmp_path_factory.mktemp("chat"), CHATML)
    llm = LLM(str(model), num_workers=1, max_model_len=300, idle_exit_s=None)
    with served(llm) as running:
        yield running
        running.settled()


@pytest.fixture(scope="module")
def client(server: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def params(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 24, "ignore_eos": True, "logit_bias": WORDS, **changes})


def offline(server: Served, prompt: Any, **changes: Any) -> Any:
    return server.engine.generate(prompt, params(**changes))[0].outputs[0]


def metric(server: Served, name: str) -> float:
    """The sum of a metric's samples."""
    lines = [line.split() for line in server.http.get("/metrics").text.splitlines() if line.startswith(name)]
    assert lines, name
    return sum(float(value) for *_, value in lines)


def test_completions(client: openai.OpenAI, server: Served) -> None:
    """Text and ids, one prompt and several; echo; usage."""
    want, ids = offline(server, PROMPT), server.engine.tokenizer.encode(PROMPT)
    assert len(want.text) == len(want.token_ids) == 24
    for prompt in (PROMPT, ids):
        answer = client.completions.create(prompt=prompt, **GREEDY)
        (choice,) = answer.choices
        assert (choice.text, choice.finish_reason) == (want.text, "length")
        assert choice.model_extra is not None and choice.model_extra["token_ids"] == want.token_ids
        assert answer.usage is not None
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(ids), 24)
    both = client.completions.create(prompt=[PROMPT, "Birds"], echo=True, **GREEDY)
    other = offline(server, "Birds").text
    assert [choice.text for choice in both.choices] == [PROMPT + want.text, "Birds" + other]


def test_a_stream_of_completions(client: openai.OpenAI, server: Served) -> None:
    """Several prompts at once, each in its order, with the usage in the last piece."""
    prompts = [PROMPT, "Birds", "12 + 30 ="]
    texts, reasons, usage = [""] * 3, [""] * 3, None
    options = {"include_usage": True}
    for piece in client.completions.create(prompt=prompts, stream=True, stream_options=options, **GREEDY):
        usage = piece.usage
        for choice in piece.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [offline(server, prompt).text for prompt in prompts]
    assert reasons == ["length"] * 3
    assert usage is not None and usage.completion_tokens == 3 * 24


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings(client: openai.OpenAI, server: Served, stream: bool) -> None:
    """The text ends in front of one, or behind it if that is asked for; no token comes after it."""
    text = offline(server, PROMPT).text
    stop = text[7:10]
    end = text.index(stop)
    for included in (False, True):
        extra = {"extra_body": {**EXTRA["extra_body"], "include_stop_str_in_output": included}}
        asked = {**GREEDY, **extra, "stop": ["ZZ", stop], "prompt": PROMPT}
        if stream:
            pieces = list(client.completions.create(stream=True, **asked))
            found = "".join(piece.choices[0].text for piece in pieces)
            reason = pieces[-1].choices[0].finish_reason
        else:
            choice = client.completions.create(**asked).choices[0]
            found, reason = choice.text, choice.finish_reason
        assert (found, reason) == (text[: end + len(stop) * included], "stop")


def test_seeds(client: openai.OpenAI, server: Served) -> None:
    """Completions of one prompt have seeds one behind another, whether they come whole or in pieces."""
    whole = [choice.text for choice in client.completions.create(prompt=PROMPT, n=3, **DRAWN).choices]
    drawn = {"temperature": 5.0, "max_tokens": 12}
    assert whole == [offline(server, PROMPT, seed=11 + number, **drawn).text for number in range(3)]
    assert len(set(whole)) == 3
    texts = [""] * 3
    for piece in client.completions.create(prompt=PROMPT, n=3, stream=True, **DRAWN):
        for choice in piece.choices:
            texts[choice.index] += choice.text
    assert texts == whole


def test_chat(client: openai.OpenAI, server: Served) -> None:
    """Whole and in pieces, as `LLM.chat` answers."""
    want = server.engine.chat(MESSAGES, params())[0]
    answer = client.chat.completions.create(messages=MESSAGES, **GREEDY)
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == want.outputs[0].text
    assert answer.usage is not None and answer.usage.prompt_tokens == len(want.prompt_token_ids)
    pieces = list(
        client.chat.completions.create(
            messages=MESSAGES, stream=True, stream_options={"include_usage": True}, n=2, **DRAWN
        )
    )
    whole = client.chat.completions.create(messages=MESSAGES, n=2, **DRAWN)
    texts = ["", ""]
    for piece in pieces:
        for choice in piece.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]
    assert texts[0] != texts[1] and pieces[-1].usage == whole.usage


def test_an_end_token(client: openai.OpenAI, server: Served) -> None:
    """Is not shown, and counts."""
    choice = offline(server, PROMPT)
    asked = {**GREEDY, "extra_body": {"stop_token_ids": [choice.token_ids[5]], "ignore_eos": True}}
    answer = client.completions.create(prompt=PROMPT, **asked)
    first = choice.token_ids.index(choice.token_ids[5])
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None and answer.usage.completion_tokens == first + 1
    assert answer.choices[0].text in (choice.text[:first], choice.text[: first + 1])


def test_tokens(server: Served) -> None:
    http, tokenizer = server.http, server.engine.tokenizer
    for text in ("the cat é漢🙂", "", "<|im_start|>"):
        answer = http.post("/tokenize", json={"prompt": text}).json()
        assert answer["tokens"] == tokenizer.encode(text) and answer["max_model_len"] == 300
    for text in ("the cat é漢🙂", "<|im_start|>user"):
        ids = tokenizer.encode(text)[1:]
        assert http.post("/detokenize", json={"tokens": ids}).json() == {"prompt": text}
    assert http.post("/tokenize", json={"messages": MESSAGES}).json()["tokens"] == server.engine.render_chat(MESSAGES)


def test_operations(client: openai.OpenAI, server: Served) -> None:
    """The model, health, version, page, and counters that move by what was asked."""
    (model,) = client.models.list().data
    assert model.id == client.models.retrieve(MODEL).id == MODEL
    assert model.model_extra is not None and model.model_extra["max_model_len"] == 300
    assert server.http.get("/health").status_code == 200
    assert server.http.get("/version").json() == {"version": distmk.__version__}
    assert "<html" in server.http.get("/").text
    names = ("vllm:generation_tokens_total", "vllm:prompt_tokens_total", "vllm:request_success_total")
    before = [metric(server, name) for name in names]
    answer = client.completions.create(prompt=PROMPT, **GREEDY)
    assert answer.usage is not None
    moved = [metric(server, name) - earlier for name, earlier in zip(names, before, strict=True)]
    assert moved == [24, answer.usage.prompt_tokens, 1]
    server.settled()
    stats = server.http.get("/stats").json()
    assert stats["num_free_kv_pages"] == stats["num_kv_pages"] > 0 and stats["iteration_ms"] >= 0


def test_refusals(client: openai.OpenAI, server: Served) -> None:
    """What the engine refuses is the client's mistake, names the parameter, and leaves nothing behind."""
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("max_tokens", {"max_tokens": 4000}),
        ("prompt", {"prompt": "a" * 400}),
        ("prompt", {"prompt": [100_000]}),
        ("temperature", {"temperature": -1}),
        ("logit_bias", {"logit_bias": {"100000": 1}}),
    ]
    for param, changes in wrong:
        with pytest.raises(openai.BadRequestError) as refused:
            client.completions.create(**{**GREEDY, "prompt": PROMPT, **changes})
        assert refused.value.param == param, refused.value
    with pytest.raises(openai.NotFoundError):
        client.completions.create(**{**GREEDY, "model": "other", "prompt": PROMPT})
    server.settled()


def test_a_client_that_leaves(client: openai.OpenAI, server: Served) -> None:
    """Its sequences end at once, those that wait too, and their slots and pages are free."""
    stream = client.completions.create(**{**GREEDY, "prompt": [PROMPT] * 200, "max_tokens": 280, "stream": True})
    next(iter(stream))
    stream.close()
    server.settled()
    aborted = 'vllm:request_success_total{engine="0",finished_reason="abort"'
    until(lambda: aborted in server.http.get("/metrics").text)
    assert metric(server, aborted) >= 1
