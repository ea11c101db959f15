"""Constrained requests: masks reach the launch while it runs. Rows are repeated until theirs is there, and no token changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.automaton import Automaton, Walk
from support.machine import require
from support.oracle_drafter import drafting, futures, perturbed
from support.pages import check_all_free, random_ids
from support.served_requests import Served
from support.tiny import Reference, check_best_allowed, make, save

from distmk import LLM, SamplingParams
from distmk.api.outputs import outputs_of
from distmk.backends.defaults import backend_choices
from distmk.engine.request import Request

pytestmark = pytest.mark.timeout(120)

VOCAB = 203
FIXED: dict[str, Any] = {"deterministic": True, "num_workers": 1}
Ids = list[int]


def late(rng: np.random.Generator, most_s: float = 0.004) -> Callable[[], float]:
    """Delays of masks, some of them none."""
    return lambda: float(rng.uniform(0, most_s)) * bool(rng.random() < 0.7)


def walks_of(automata: Sequence[Automaton | None], late_s: Callable[[], float] = lambda: 0.0) -> list[Walk | None]:
    """The constraints of requests, some of which have none."""
    return [None if each is None else Walk(each, late_s) for each in automata]


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
            found.append(serve(llm, prompts, params, walks_of(automata, late_s)))
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


@pytest.mark.usefixtures("slab_iterations")
def test_preempted_and_cancelled(tiny_model: Path, rng: np.random.Generator) -> None:
    """With few pages and late masks, sequences that are put back go on in the state in which they were. All pages are freed."""
    common = random_ids(rng, 40)
    prompts = [[*common[: int(rng.choice([0, 40]))], *random_ids(rng, int(n))] for n in rng.integers(1, 50, 24)]
    lengths = [int(n) for n in rng.integers(10, 50, len(prompts))]
    cancelled = [int(n) if rng.random() < 0.2 else 0 for n in rng.integers(1, 20, len(prompts))]
    automata = [Automaton.random(rng, VOCAB) if index % 4 else None for index in range(len(prompts))]
    with LLM(str(tiny_model), **FIXED) as llm:
        params = [SamplingParams(max_tokens=n, ignore_eos=True, temperature=0.0) for n in lengths]
        expected = [request.token_ids for request in serve(llm, prompts, params, walks_of(automata))]
    with LLM(str(tiny_model), num_gpu_blocks_override=13, idle_exit_s=0.2, **FIXED) as llm:
        walks = walks_of(automata, late(rng, 0.002))
        served = Served(llm, list(zip(prompts, lengths, cancelled, strict=True)), walks)
        check_all_free(llm)
        stats = llm.stats()
    assert stats.num_preemptions > 1 and stats.num_repeated_rows > 10, stats
    for index, (request, got) in enumerate(zip(served.requests, served.delivered, strict=True)):
        tokens = [output.token_id for output in got if output.token_id >= 0]
        assert tokens == request.token_ids == expected[index][: len(tokens)], f"request {index}"
        assert request.finish_reason == "length" or len(tokens) >= cancelled[index] > 0, f"request {index}"


@pytest.mark.usefixtures("slab_iterations")
@pytest.mark.parametrize("method", ["ngram", "given"])
def test_others_have_drafts(
    tiny_model: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """A constrained sequence has none. The others' are verified, whether they pay or not, and no token is another one than
    without drafts.
    """
    choices = backend_choices("host")
    monkeypatch.setattr("distmk.engine.engine.backend_choices", lambda _: {**choices, "draft_row_cost": 0.0})
    prompts = [random_ids(rng, 6) * 4 for _ in range(12)]
    given: dict[str, Any] = {"ignore_eos": True, "temperature": 0.0}
    params = [SamplingParams(max_tokens=int(n), **given) for n in rng.integers(10, 40, 12)]
    for index in range(0, len(params), 2):  # few tokens, which come again and again
        params[index] = params[index].checked(logit_bias={7: 100.0, 8: 100.0})
    automata = [Automaton.random(rng, VOCAB) if index % 2 else None for index in range(len(prompts))]
    with LLM(str(tiny_model), **FIXED) as llm:
        expected = [each.token_ids for each in serve(llm, prompts, params, walks_of(automata))]
    drafts = [perturbed(rng, output, 0.1) for output in expected]
    config = {"method": method, "num_speculative_tokens": 3}
    with LLM(str(tiny_model), speculative_config=config, **FIXED) as llm, drafting(futures(prompts, drafts)):
        alone = serve(llm, prompts[1::2], params[1::2], walks_of(automata[1::2], late(rng)))
        num_alone, before = llm.stats().drafts, llm.stats().num_repeated_rows
        together = serve(llm, prompts, params, walks_of(automata, late(rng)))
        stats = llm.stats()
    assert num_alone is not None and num_alone.num_drafts == 0 and before > 10
    assert stats.drafts is not None and stats.drafts.num_accepted[0] > 10, stats
    assert stats.num_repeated_rows > before + 10, stats
    assert [request.token_ids for request in alone] == expected[1::2]
    assert [request.token_ids for request in together] == expected


@pytest.mark.parametrize("config", [None, {"method": "ngram", "num_speculative_tokens": 2}], ids=["plain", "drafts"])
@pytest.mark.parametrize("row_buckets", ["16", "40"])
def test_one_that_fails_ends_alone(
    tiny_model: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, config: Any, row_buckets: str
) -> None:
    """Because nothing is allowed, because of the first mask, or of a later one; in a line each."""
    monkeypatch.setenv("DISTMK_ROW_BUCKETS", row_buckets)
    full = Automaton.random(rng, VOCAB)
    empty = Automaton(np.zeros((1, VOCAB), np.bool_), full.following[:1])
    ends = Automaton(full.allowed.copy(), np.full_like(full.following, 11))
    ends.allowed[11] = False
    broken = Walk(full)
    broken.fill_mask = lambda words: 1 // 0  # type: ignore[assignment]
    walks = [Walk(full), None, Walk(empty), Walk(ends), Walk(full, fails_at=3), broken, Walk(full), None]
    params = [SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.0)] * len(walks)
    prompts = [random_ids(rng, 9) for _ in walks]
    with LLM(str(tiny_model), num_workers=1, speculative_config=config) as llm:
        for _ in range(2):  # in the rows of those before
            requests = serve(
                llm, prompts, params, [walk and walk.copy() if walk is not broken else walk for walk in walks]
            )
            found = [(len(each.token_ids), each.finish_reason) for each in requests]
            assert (
                found
                == [(12, "length")] * 2
                + [(0, "error"), (1, "error"), (3, "error"), (0, "error")]
                + [(12, "length")] * 2
            )
            errors = [str(each.error) for each in requests[2:6]]
            assert errors[0] == errors[1] and "allows no token" in errors[0]
            assert errors[2] == "the constraint failed: ValueError: no such way"
            assert errors[3].startswith("the constraint failed: ZeroDivisionError: ")
            assert [output.finished for output in outputs_of(requests)] == [
                each is None or each[1] == "length" for each in found
            ]
        # Its row alone is repeated until the launch is told to end it.
        (alone,) = serve(llm, prompts[:1], params[:1], [Walk(full, fails_at=0)])
        assert alone.finish_reason == "error"
        check_all_free(llm)


@pytest.mark.usefixtures("slab_iterations")
def test_a_stream_that_is_left(tiny_model: Path, rng: np.random.Generator) -> None:
    """While its row waits for a mask, and nothing else runs: the launch ends it, frees its pages, and serves the next one."""
    automaton, prompt = Automaton.random(rng, VOCAB), random_ids(rng, 9)
    params = SamplingParams(max_tokens=30, ignore_eos=True, temperature=0.0)
    with LLM(str(tiny_model), idle_exit_s=0.1, **FIXED) as llm:
        (expected,) = serve(llm, [prompt], [params], [Walk(automaton)])
        requests = llm.make_requests([prompt], params)
        requests[0].constraint = walk = Walk(automaton, late(rng, 0.02))
        stream = llm.run(requests)
        for _ in range(3):
            next(stream)
        stream.close()
        check_all_free(llm)
        assert requests[0].finish_reason == "abort" and walk.accepted == requests[0].token_ids
        (again,) = serve(llm, [prompt], [params], [Walk(automaton)])
    assert requests[0].token_ids == expected.token_ids[: len(requests[0].token_ids)]
    assert again.token_ids == expected.token_ids


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("row_buckets", "num_ranks", "method"), [("16", 2, None), ("40", 1, None), ("16,40", 1, "ngram")]
)
def test_on_the_emulator(
    tmp_path: Path,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
    row_buckets: str,
    num_ranks: int,
    method: str | None,
) -> None:
    """Slab and job iterations of the GPU's kernel, and its steps with drafts. Iterations are slow, so masks are later."""
    require("emulated")
    monkeypatch.setenv("DISTMK_ROW_BUCKETS", row_buckets)
    made = make("llama", seed=1, head_dim=16, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=1)
    model, reference = str(save(made, tmp_path)), Reference(made)
    prompts = [random_ids(rng, int(n)) for n in (3, 19, 8)]
    params = [SamplingParams(max_tokens=5, ignore_eos=True, temperature=0.0)] * 3
    walks = [
        Walk(Automaton.random(rng, VOCAB), late(rng, 1.0)),
        Walk(Automaton.random(rng, VOCAB), late(rng, 1.0)),
        None,
    ]
    config = None if method is None else {"method": method, "num_speculative_tokens": 2}
    sizes: dict[str, Any] = {"tensor_parallel_size": num_ranks, "num_workers": 2, "max_model_len": 64}
    with LLM(model, backend="emulated", speculative_config=config, **sizes) as llm:
        requests = serve(llm, prompts, params, walks)
        stats = llm.stats()
    assert stats.num_repeated_rows > 0
    for request, walk in zip(requests, walks, strict=True):
        masks = [*walk.automaton.masks(request.token_ids)] if walk else [np.ones(VOCAB, np.bool_)] * 5
        check_best_allowed(reference, request.prompt_ids, request.token_ids, masks, f"request {request.index}")
