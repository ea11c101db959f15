"""Log probabilities from the endpoints, with a real engine behind: a fake one knows all of a prompt at once."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from support.logprob_checks import Expected, scored_model
from support.served import served

from distmk import LLM


def test_logprobs(rng: np.random.Generator, tmp_path: Path) -> None:
    """Both endpoints, whole and as a stream, with the values of `generate`."""
    model, reference = scored_model(tmp_path / "model", int(rng.integers(1 << 30)))
    ids = [int(token) for token in rng.integers(0, 256, 20)]
    with served(LLM(str(model), num_workers=1, max_model_len=128)) as server, server.http as http:
        ask = {"model": "fake", "max_tokens": 4, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        body = {**ask, "prompt": ids, "n": 2, "logprobs": 3, "echo": True}
        answer = http.post("/v1/completions", json=body).json()
        for choice in answer["choices"]:
            tokens, found = [*ids, *choice["token_ids"]], choice["logprobs"]
            expected = Expected(reference, tokens)
            assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
            for position, (token, value) in enumerate(zip(tokens[1:], found["token_logprobs"][1:], strict=True)):
                assert abs(value - float(expected.values[position, token])) <= expected.tolerance
            assert all(1 <= len(top) <= 3 for top in found["top_logprobs"][1:])  # tokens of a byte may look alike
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
