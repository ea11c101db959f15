"""Drafts: tokens and logprobs are bit by bit those of plain decoding. How many drafts are accepted is known beforehand."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.oracle_drafter import accepted_by_place, drafting, futures, perturbed

from distmk import LLM, SamplingParams
from distmk.api.outputs import RequestOutput

pytestmark = pytest.mark.usefixtures("slab_iterations")

VOCAB = 203
Ids = list[int]


def llm_with(model: Path, num_drafts: int = 0, **more: Any) -> LLM:
    """An LLM whose sequences have up to `num_drafts` drafts; rows round alike in any company."""
    config = {"method": "given", "num_speculative_tokens": num_drafts} if num_drafts else None
    return LLM(str(model), **{"deterministic": True, "num_workers": 2, "speculative_config": config, **more})


def prompts_of(rng: np.random.Generator, num: int) -> list[Ids]:
    return [rng.integers(0, VOCAB, rng.integers(1, 40)).tolist() for _ in range(num)]


def params_of(rng: np.random.Generator, num: int, *, stops: bool = True) -> list[SamplingParams]:
    """Greedy and drawn, with every penalty, bias, limit, stop and report, each in some of them.

    stops: some have stop tokens, which the launch does not know, so that it may verify drafts behind one.
    """
    return [one_of(rng, index, stops) for index in range(num)]


def one_of(rng: np.random.Generator, index: int, stops: bool) -> SamplingParams:
    def some(share: float = 0.5) -> bool:
        return bool(rng.random() < share)

    given: dict[str, Any] = {"max_tokens": int(rng.integers(1, 40)), "temperature": 0.0}
    if index % 3:
        given |= {"temperature": float(rng.uniform(0.3, 1.5)), "seed": int(rng.integers(1 << 30))}
        given |= {"top_k": int(rng.integers(2, 60))} if some() else {}
        given |= {"top_p": float(rng.uniform(0.5, 1))} if some() else {}
        given |= {"min_p": float(rng.uniform(0, 0.1))} if some() else {}
    if index % 2:
        given |= {"repetition_penalty": float(rng.uniform(1.05, 1.6))} if some() else {}
        given |= {"frequency_penalty": float(rng.uniform(0.1, 1.9))} if some() else {}
        given |= {"presence_penalty": float(rng.uniform(-1.5, 1.5))} if some() else {}
        given |= {"logit_bias": {int(rng.integers(VOCAB)): 5.0 for _ in range(5)}} if some() else {}
        given |= {"logprobs": int(rng.integers(0, 5))} if some() else {}
        given |= {"prompt_logprobs": 2} if some(0.3) else {}
        given |= {"stop_token_ids": rng.integers(0, VOCAB, 6).tolist()} if stops and some() else {}
        given |= {"min_tokens": min(8, given["max_tokens"])} if some() else {}
    return SamplingParams(**given)


def record_of(output: RequestOutput) -> Any:
    """Everything that must be the same bits."""
    completion = output.outputs[0]
    told = [output.prompt_logprobs, completion.logprobs]
    numbers = [
        None
        if each is None
        else [
            None if at is None else {token: (found.logprob, found.rank) for token, found in at.items()} for at in each
        ]
        for each in told
    ]
    return completion.token_ids, completion.finish_reason, completion.stop_reason, numbers


def check_same(got: Sequence[RequestOutput], want: Sequence[RequestOutput], params: Sequence[SamplingParams]) -> None:
    for index, (ours, plain) in enumerate(zip(got, want, strict=True)):
        mine, its = ours.outputs[0].token_ids, plain.outputs[0].token_ids
        same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(mine, its, strict=False)))
        what = f"prompt {index} of {len(plain.prompt_token_ids)} tokens, {params[index]}"
        assert record_of(ours) == record_of(plain), f"{what}: differs from token {same}: {mine}, {its}"


@pytest.fixture(scope="module")
def plain_llm(tiny_model: Path) -> Iterator[LLM]:
    with llm_with(tiny_model) as llm:
        yield llm


@pytest.fixture(scope="module")
def drafting_llm(tiny_model: Path) -> Iterator[LLM]:
    with llm_with(tiny_model, 5) as llm:
        yield llm


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_one_sequence(plain_llm: LLM, drafting_llm: LLM, rng: np.random.Generator, share: float) -> None:
    """Each prompt alone: tokens and logprobs are the same, and as many drafts are accepted at each place as must be."""
    prompts, params = prompts_of(rng, 12), params_of(rng, 12, stops=False)
    want = plain_llm.generate(prompts, params)
    outputs = [list(output.outputs[0].token_ids) for output in want]
    drafts = [perturbed(rng, output, share) for output in outputs]
    got = []
    for index, prompt in enumerate(prompts):
        before = drafting_llm.stats().drafts
        with drafting(futures([prompt], [drafts[index]])):
            got += drafting_llm.generate([prompt], params[index])
        after = drafting_llm.stats().drafts
        assert before is not None and after is not None
        found = (
            after.num_drafts - before.num_drafts,
            [a - b for a, b in zip(after.num_accepted, before.num_accepted, strict=True)][:5],
        )
        expected = accepted_by_place(outputs[index], drafts[index], 5)
        assert found == expected, f"prompt {index}: accepted {found}, expected {expected}"
    check_same(got, want, params)


def test_many_sequences(plain_llm: LLM, drafting_llm: LLM, rng: np.random.Generator) -> None:
    """All at once, and more than run at once: they share the rows that are left for drafts."""
    prompts, params = prompts_of(rng, 40), params_of(rng, 40)
    want = plain_llm.generate(prompts, params)
    drafts = [perturbed(rng, output.outputs[0].token_ids, 0.2) for output in want]
    with drafting(futures(prompts, drafts)):
        check_same(drafting_llm.generate(prompts, params), want, params)
    stats = drafting_llm.stats().drafts
    assert stats is not None and min(stats.num_accepted[:5]) > 0


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks(tiny_model: Path, rng: np.random.Generator, num_ranks: int) -> None:
    prompts, params = prompts_of(rng, 12), params_of(rng, 12)
    with llm_with(tiny_model, tensor_parallel_size=num_ranks, num_workers=1) as llm:
        want = llm.generate(prompts, params)
    drafts = [perturbed(rng, output.outputs[0].token_ids, 0.2) for output in want]
    with (
        llm_with(tiny_model, 3, tensor_parallel_size=num_ranks, num_workers=1) as llm,
        drafting(futures(prompts, drafts)),
    ):
        check_same(llm.generate(prompts, params), want, params)
        stats = llm.stats().drafts
    assert stats is not None and min(stats.num_accepted[:3]) > 0 and stats.num_accepted[3] == 0
