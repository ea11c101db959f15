"""Sampling parameters as the kernel takes them."""

from __future__ import annotations

from typing import Any

import pytest

from distmk import SamplingParams, UsageError
from distmk.abi import RowSample, SamplingFlag
from distmk.api.input_processor import InputProcessor
from distmk.engine.sampling_slot import pack_sampling, row_sample_of


def test_greedy_requests_need_no_logits() -> None:
    greedy: list[dict[str, Any]] = [{}, {"temperature": 0, "top_p": 0.5}, {"temperature": 2.0, "top_k": 1}, {"n": 3}]
    assert {row_sample_of(SamplingParams(**each)) for each in greedy} == {RowSample.GREEDY}
    drawn: dict[str, Any] = {"temperature": 1.0, "repetition_penalty": 1.1, "presence_penalty": 0.1, "logprobs": 0}
    drawn |= {"frequency_penalty": -0.1, "logit_bias": {1: 1}, "min_tokens": 1}
    assert {row_sample_of(SamplingParams(**{name: value})) for name, value in drawn.items()} == {RowSample.DRAW}


def test_slot_of_a_request() -> None:
    params = SamplingParams(
        temperature=0.5, top_k=-1, seed=-1, logit_bias={7: -2.5}, min_tokens=3, stop_token_ids=[9, 2], logprobs=20
    )
    slot, biases = pack_sampling(params, (2, 4))
    assert (slot.temperature, slot.top_k, slot.seed, slot.min_tokens) == (0.5, 0, 2**64 - 1, 3)
    assert (slot.num_logprobs, slot.num_prompt_logprobs, slot.flags) == (20, -1, SamplingFlag.SEEDED)
    assert [(bias.token, bias.value) for bias in biases] == [(7, -2.5), (2, 0.0), (4, 0.0), (9, 0.0)]
    assert (slot.num_biases, slot.num_banned) == (1, 3)
    slot, biases = pack_sampling(SamplingParams(frequency_penalty=0.5), (2,))
    assert slot.flags == SamplingFlag.PENALTIES and not biases
    assert slot.seed != pack_sampling(SamplingParams(), ())[0].seed, "each request has a seed of its own"
    with pytest.raises(UsageError, match="stop_token_ids has 90 tokens, those of the model included; at most 84"):
        pack_sampling(SamplingParams(min_tokens=1, stop_token_ids=list(range(90))), ())


def test_what_does_not_fit_into_a_slot_is_refused_before_it_is_sent() -> None:
    """Else the launch, which others use too, would be left with a request that nobody serves."""
    inputs = InputProcessor(1000, 16, eos_ids=tuple(range(900, 910)))
    banned = SamplingParams(min_tokens=1, stop_token_ids=list(range(80)))
    for params in (SamplingParams(logit_bias=dict.fromkeys(range(301), 1.0)), banned):
        with pytest.raises(UsageError, match="can be given"):
            inputs.make_requests([[1]], params)
    assert len(inputs.make_requests([[1]], SamplingParams(logit_bias=dict.fromkeys(range(300), 1.0)))) == 1
