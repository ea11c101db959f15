"""Constrained requests: masks reach the launch while it runs. Rows are repeated until theirs is there, and no token changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.automaton import Automaton, Walk
from support.pages import random_ids
from support.tiny import Reference, check_best_allowed

from distmk import LLM, SamplingParams
from distmk.engine.request import Request

pytestmark = pytest.mark.timeout(120)

VOCAB = 203
Ids = list[int]


def late(rng: np.random.Generator, most_s: float = 0.004) -> Callable[[], float]:
    """Delays of masks, some of them none."""
    return lambda: float(rng.uniform(0, most_s)) * bool(rng.random() < 0.7)


def params_of(rng: np.random.Generator, index: int) -> SamplingParams:
    """Greedy, or drawn with penalties and reports."""
    given: dict[str, Any] = {"max_tokens": int(rng.integers(1, 30)), "temperature": 0.0, "ignore_eos": True}
    if index % 4 > 1:
        given |= {"temperature": 1.3, "seed": index, "logprobs": 2, "prompt_logprobs": 1}
        given |= {"frequency_penalty": 1.5, "repetition_penalty": 1.2} if index % 4 == 3 else {}
    return SamplingParams(**given)


def serve(
    llm: LLM, prompts: Sequence[Ids], params: Sequence[SamplingParams], constraints: Sequence[Walk | None]
) -> list[Request]:
    requests = llm.make_requests(list(prompts), list(params))
    for request, constraint in zip(requests, constraints, strict=True):
        request.constraint = constraint
    for _ in llm.run(requests):
        pass
    return requests


def record_of(request: Request) -> Any:
    """What must not depend on when masks come."""
    told = [
        [
            None if at is None else {token: (found.logprob, found.rank) for token, found in at.items()}
            for at in each or ()
        ]
        for each in (request.logprobs, request.prompt_logprobs)
    ]
    return request.token_ids, request.finish_reason, told


@pytest.mark.parametrize(("num_ranks", "row_buckets"), [(1, "16"), (2, "16"), (1, "16,64"), (2, "40")])
def test_late_masks_change_no_token(
    tiny_model: Path,
    tiny_reference: Reference,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
    num_ranks: int,
    row_buckets: str,
) -> None:
    """Each token is allowed, and of greedy ones the best that is. Sequences without a constraint run beside them."""
    monkeypatch.setenv("DISTMK_ROW_BUCKETS", row_buckets)
    prompts = [random_ids(rng, int(n)) for n in rng.integers(1, 40, 20)]
    params = [params_of(rng, index) for index in range(len(prompts))]
    automata = [Automaton.random(rng, VOCAB) if index % 5 else None for index in range(len(prompts))]
    found, repeated = [], []
    is_exact = row_buckets == "16"  # rows round alike, whatever shares their iteration
    with LLM(
        str(tiny_model), tensor_parallel_size=num_ranks, num_workers=1, max_num_seqs=12, deterministic=is_exact
    ) as llm:
        for late_s in (lambda: 0.0, late(rng)):
            before = llm.stats().num_repeated_rows
            found.append(serve(llm, prompts, params, [each and Walk(each, late_s) for each in automata]))
            repeated.append(llm.stats().num_repeated_rows - before)
    assert repeated[1] > 20, repeated
    for index, (one, other, automaton) in enumerate(zip(*found, automata, strict=True)):
        if is_exact:
            assert record_of(one) == record_of(other), f"request {index}"
        for request in (one, other):
            assert len(request.token_ids) == request.params.max_tokens and request.finish_reason == "length"
            assert request.logprobs is None or len(request.logprobs) == len(request.token_ids)
            if automaton is None:
                continue
            masks = list(automaton.masks(request.token_ids))
            assert isinstance(request.constraint, Walk) and request.constraint.accepted == request.token_ids[:-1]
            if request.params.temperature == 0:
                check_best_allowed(tiny_reference, request.prompt_ids, request.token_ids, masks, f"request {index}")
