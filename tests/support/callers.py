"""Callers that submit requests and cancel some."""

from __future__ import annotations

import random
import time
from functools import partial
from queue import SimpleQueue

from distmk import LLM, SamplingParams
from distmk.engine.token_output import TokenOutput


def submit_at_random(llm: LLM, seed: int, num_requests: int = 64, exact: bool = True) -> None:
    """Submit requests of random lengths and cancel some, at random moments: each gets its own tokens, up to its labelled end.

    `exact`: they are those of the same requests without cancels, as on a backend whose logits do not depend on the batch.
    """
    rng = random.Random(seed)
    prompts = [[rng.randrange(100) for _ in range(rng.randrange(1, 40))] for _ in range(num_requests)]
    params = [SamplingParams(max_tokens=rng.randrange(1, 60), ignore_eos=True) for _ in prompts]

    def generate() -> list[list[int]]:
        return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]

    expected = generate()
    outputs: list[list[TokenOutput]] = [[] for _ in prompts]
    over: SimpleQueue[int] = SimpleQueue()

    def deliver(number: int, output: TokenOutput | BaseException) -> None:
        if isinstance(output, BaseException):
            over.put(-1)
            return
        outputs[number].append(output)
        if output.finish_reason:
            over.put(number)

    requests = []
    for number, prompt in enumerate(prompts):
        requests.append(llm.submit(prompt, params[number], partial(deliver, number)))
        if rng.random() < 0.3:
            time.sleep(rng.random() * 0.004)
        if rng.random() < 0.3:
            llm.cancel(rng.choice(requests))
    assert sorted(over.get(timeout=60) for _ in prompts) == list(range(num_requests)), f"seed {seed}"
    for number, found in enumerate(outputs):
        where = f"seed {seed}, request {number}"
        reasons = [token.finish_reason for token in found]
        assert set(reasons[:-1]) <= {None} and reasons[-1] in ("length", "abort"), where
        ids = [token.token_id for token in found if token.finish_reason != "abort"]
        assert reasons[-1] == "abort" or len(ids) == params[number].max_tokens, where
        assert not exact or ids == expected[number][: len(ids)], where
    assert [len(ids) for ids in generate()] == [p.max_tokens for p in params]
    assert not exact or generate() == expected, f"seed {seed}"
