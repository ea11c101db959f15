"""Log probabilities from the endpoints, with a real engine behind: a fake one knows all of a prompt at once."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from support import tiny
from support.byte_fallback import byte_fallback
from support.logprob_checks import HEADS, Expected, scored_model
from support.served import served

from distmk import LLM

WORDS = ["▁", "▁en", "en", "▁the", "the", "s", "a", "t", "▁a", "é", "▁é", "h"]


def test_logprobs(rng: np.random.Generator, tmp_path: Path) -> None:
    """Both endpoints, whole and as a stream, with the values of the reference.

    Values are compared for equality, so the engine is deterministic: which rows share a batch is a matter of time.
    """
    model, reference = scored_model(tmp_path / "model", int(rng.integers(1 << 30)))
    ids = [int(token) for token in rng.integers(0, 256, 20)]
    llm = LLM(str(model), num_workers=1, max_model_len=128, deterministic=True)
    with served(llm) as server, server.http as http:
        ask = {"model": "fake", "max_tokens": 4, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        body = {**ask, "prompt": ids, "n": 2, "logprobs": 3, "echo": True}
        answer = http.post("/v1/completions", json=body).json()
        for choice in answer["choices"]:
            tokens, found = [*ids, *choice["token_ids"]], choice["logprobs"]
            expected = Expected(reference, tokens)
            assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
            for position, (token, value) in enumerate(zip(tokens[1:], found["token_logprobs"][1:], strict=True)):
                assert abs(value - float(expected.values[position, token])) <= expected.tolerance
            assert all(3 <= len(top) <= 4 for top in found["top_logprobs"][1:])  # tokens of a byte look alike
        lines = http.post("/v1/completions", json={**body, "stream": True}).text.split("\n\n")[:-2]
        pieces = [json.loads(line[6:]) for line in lines]
        for choice in answer["choices"]:
            parts = [one["logprobs"] for piece in pieces for one in piece["choices"] if one["index"] == choice["index"]]
            for name, values in choice["logprobs"].items():
                assert [value for part in parts for value in part[name]] == values, name
        scored = http.post("/v1/completions", json={**ask, "prompt": ids, "prompt_logprobs": 0}).json()["choices"][0]
        assert [next(iter(one)) for one in scored["prompt_logprobs"][1:]] == list(map(str, ids[1:]))
        chat = {**ask, "messages": [{"role": "user", "content": "Hi"}], "logprobs": True, "top_logprobs": 2}
        prompt = http.post("/tokenize", json={"model": "fake", "messages": chat["messages"]}).json()["tokens"]
        choice = http.post("/v1/chat/completions", json=chat).json()["choices"][0]
        expected = Expected(reference, [*prompt, *choice["token_ids"]])
        for position, entry in enumerate(choice["logprobs"]["content"], len(prompt) - 1):
            top = entry["top_logprobs"]
            assert [entry["logprob"], entry["bytes"]] == [top[0]["logprob"], top[0]["bytes"]], "greedy"
            assert abs(top[0]["logprob"] - float(expected.values[position].max())) <= expected.tolerance
            assert len(top) == 2 and top[1]["logprob"] <= top[0]["logprob"]
        server.settled()


def test_tokens_are_the_text(rng: np.random.Generator, tmp_path: Path) -> None:
    """With a vocabulary of words and bytes: the strings, offsets and bytes of tokens are those of the text around them."""
    seed, num_tokens = int(rng.integers(1 << 30)), 256 + len(WORDS) + 1
    model = tiny.save(tiny.make("llama", seed, vocab_size=num_tokens, **HEADS), tmp_path / "model")
    byte_fallback(WORDS).save(str(model / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    biases = {str(word): 9.0 for word in range(256, num_tokens - 1)}  # else most tokens would be bytes
    with served(LLM(str(model), num_workers=1, max_model_len=128)) as server, server.http as http:
        ask = {"model": "fake", "max_tokens": 30, "seed": seed, "ignore_eos": True, "logit_bias": biases}
        for prompt in ("the en 漢s", "s", [num_tokens - 1], [257, 256 + 3, 0xE6, 0xBC, 0xA2, 257]):
            for echo in (True, False):
                body = {**ask, "prompt": prompt, "logprobs": 5, "echo": echo, "n": 2}
                for choice in http.post("/v1/completions", json=body).json()["choices"]:
                    found, text = choice["logprobs"], choice["text"]
                    parts = zip(found["text_offset"], found["tokens"], found["top_logprobs"], strict=True)
                    for number, (offset, token, top) in enumerate(parts):
                        whole = not token.startswith(("bytes:", "<s>"))
                        assert not whole or text[offset : offset + len(token)] == token, (seed, text, offset, token)
                        assert (top is None) if echo and not number else (token in top and len(top) in (5, 6))
        chat = {**ask, "messages": [{"role": "user", "content": "the"}], "logprobs": True, "top_logprobs": 3}
        choice = http.post("/v1/chat/completions", json=chat).json()["choices"][0]
        entries = choice["logprobs"]["content"]
        joined = b"".join(bytes(entry["bytes"]) for entry in entries)
        assert joined.decode(errors="replace") == choice["message"]["content"] != ""
        assert all(len(entry["top_logprobs"]) == 3 for entry in entries)
        answer = http.post("/v1/completions", json={**ask, "prompt": "the en h", "prompt_logprobs": 0}).json()
        scored = answer["choices"][0]["prompt_logprobs"][1:]
        own = [next(iter(one.values()))["decoded_token"] for one in scored]
        assert own == ["the", " en", " ", "h"]
        strings = http.post("/tokenize", json={"prompt": "the en h", "return_token_strs": True}).json()["token_strs"]
        assert strings == ["<s>", "the", " en", " ", "h"]
        server.settled()
