"""Prompts and sampling parameters in the forms that vLLM takes; anything else is refused in one line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from distmk import LLM, SamplingParams
from distmk.api.prompts import either_params, read_params, read_prompt, read_prompts
from distmk.errors import UsageError

IDS = [1, 2, 3]
ACCEPTED: list[tuple[Any, list[str | list[int]]]] = [
    ("text", ["text"]),
    ("", [""]),  # with a BOS token it has tokens
    (np.str_("text"), ["text"]),
    (["a", "b"], ["a", "b"]),
    (("a", "b"), ["a", "b"]),
    (np.array(["a", "b"]), ["a", "b"]),
    (IDS, [IDS]),
    (tuple(IDS), [IDS]),
    (range(1, 4), [IDS]),
    ([np.int64(1), np.uint8(2), 3], [IDS]),
    ([torch.tensor(1), torch.tensor(2), 3], [IDS]),
    ([IDS, [4]], [IDS, [4]]),
    ((tuple(IDS), [4]), [IDS, [4]]),
    (["a", IDS], ["a", IDS]),
    *((np.array(IDS, dtype), [IDS]) for dtype in (np.int32, np.int64, np.uint16, object)),
    (np.array([IDS, IDS]), [IDS, IDS]),
    ([np.array(IDS), np.array([4])], [IDS, [4]]),
    (torch.tensor(IDS), [IDS]),
    (torch.tensor([IDS, IDS], dtype=torch.int32), [IDS, IDS]),
    ([torch.tensor(IDS), "a"], [IDS, "a"]),
    ({"prompt": "text"}, ["text"]),
    ({"prompt_token_ids": IDS}, [IDS]),
    ({"prompt_token_ids": torch.tensor(IDS)}, [IDS]),
    ({"prompt_token_ids": IDS, "prompt": "text"}, [IDS]),  # the text is for people
    ([{"prompt": "text"}, {"prompt_token_ids": (4,)}, "a"], ["text", [4], "a"]),
]
REFUSED: list[tuple[Any, str]] = [
    (None, "the prompt is None; expected text, a list of token ids, or a list of such prompts"),
    (b"text", "the prompt is a bytes; decode it to text first; expected text"),
    (bytearray(b"text"), "the prompt is a bytearray; decode it"),
    (memoryview(b"text"), "the prompt is a memoryview; decode it"),
    ([b"text"], "the prompt is a bytes; decode it"),
    (["a", b"text"], "prompt 1 is a bytes; decode it"),
    ((prompt for prompt in ["a"]), "the prompt is a generator; make a list of it first; expected"),
    ({"a"}, "the prompt is a set; make a list of it first"),
    (iter(IDS), "the prompt is a list_iterator; make a list of it first"),
    ([iter(IDS)], "the prompt is a list_iterator; make a list"),
    (5, "the prompt is 5; expected text"),
    (1.5, "the prompt is 1.5; expected text"),
    (True, "the prompt is True; expected text"),
    (np.int64(5), "the prompt is 5; expected text"),
    (torch.tensor(5), "the prompt is 5; expected text"),
    (object(), "the prompt is an object; expected text"),
    ([1.0, 2.0], "the prompt has 1.0 (float) at position 0, where a token id is expected"),
    ([1, 2.0], "the prompt has 2.0 (float) at position 1"),
    (np.array([1.0]), "the prompt has 1.0 (float) at position 0"),
    (torch.tensor([[1.0]]), "the prompt has 1.0 (float) at position 0"),
    ([True, False], "the prompt has True (bool) at position 0"),
    (np.array([True]), "the prompt has True (bool) at position 0"),
    ([IDS, [1, None]], "prompt 1 has None (NoneType) at position 1"),
    ([1, "a"], "the prompt has 'a' (str) at position 1"),
    ([1, IDS], "the prompt has [1, 2, 3] (list) at position 1"),
    (["a", 1], "prompt 1 is 1; expected"),
    ([["a"]], "the prompt has 'a' (str) at position 0"),
    ([[IDS]], "the prompt has [1, 2, 3] (list) at position 0"),
    (np.zeros((2, 1, 1), int), "prompt 0 has [0] (list) at position 0"),
    ([], "there is no prompt; give at least one"),
    (np.zeros((0, 3), int), "there is no prompt; give at least one"),
    ({}, "the prompt is a dict of nothing; expected {'prompt': text} or {'prompt_token_ids': token ids}"),
    ({"text": "a"}, "the prompt is a dict of 'text'; expected"),
    ({"prompt": "a", "multi_modal_data": None}, "the prompt is a dict of 'prompt', 'multi_modal_data'; expected"),
    ({"prompt": None}, "'prompt' of the prompt is None; expected text"),
    ({"prompt": IDS}, "'prompt' of the prompt is a list; expected text; token ids go into 'prompt_token_ids'"),
    ({"prompt_token_ids": "text"}, "'prompt_token_ids' of the prompt is a str; expected a list of token ids"),
    ({"prompt_token_ids": [IDS]}, "the prompt has [1, 2, 3] (list) at position 0"),
    ({"prompt_token_ids": b"text"}, "'prompt_token_ids' of the prompt is a bytes; decode it"),
]


@pytest.mark.parametrize(("given", "prompts"), ACCEPTED, ids=[str(number) for number in range(len(ACCEPTED))])
def test_accepted(given: Any, prompts: list[str | list[int]]) -> None:
    got = read_prompts(given)
    assert got == prompts
    assert all(type(each) is str or all(type(token) is int for token in each) for each in got)


@pytest.mark.parametrize(("given", "text"), REFUSED, ids=[text for _, text in REFUSED])
def test_refused(given: Any, text: str) -> None:
    with pytest.raises(UsageError, match=re.escape(text)) as refused:
        read_prompts(given)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 250


def test_one_prompt() -> None:
    assert read_prompt(IDS) == IDS and read_prompt(["a"]) == "a"
    with pytest.raises(UsageError, match="2 prompts were given; this call takes one"):
        read_prompt(["a", "b"])


def test_params() -> None:
    few = SamplingParams(max_tokens=2)
    assert read_params(None, 2) == [SamplingParams()] * 2 and read_params(few, 2) == [few, few]
    for several in ([few, SamplingParams()], (few, SamplingParams())):
        assert read_params(several, 2) == [few, SamplingParams()]
    assert either_params(None, few) is few and either_params(few, None) is few
    for given, text in (
        ([], "2 prompts were given 0 sampling params; give one for all, or one a prompt"),
        ([few], "2 prompts were given 1 sampling params"),
        ({"max_tokens": 3}, "the sampling params are a dict; expected SamplingParams, or a list"),
        (7, "the sampling params are 7; expected"),
        (0, "the sampling params are 0; expected"),
        ([few, None], "sampling params 1 are None; expected SamplingParams"),
    ):
        with pytest.raises(UsageError, match=re.escape(text)):
            read_params(given, 2)
    with pytest.raises(UsageError, match="two names of one argument"):
        either_params(few, few)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"max_tokens": 2.0}, "max_tokens is 2.0"),
        ({"max_tokens": "2"}, "max_tokens is '2'"),
        ({"max_tokens": True}, "max_tokens is True"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"max_tokens": "2" * 99}, f"max_tokens is '{'2' * 56}...;"),
        ({"max_tokens": -(10**5000)}, "max_tokens is -2**16609 or more"),
        ({"temperature": "0"}, "temperature is '0'; expected 0 to 100"),
        ({"temperature": None}, "temperature is None"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": True}, "temperature is True"),
        ({"ignore_eos": "no"}, "ignore_eos is 'no'; expected True or False"),
        ({"top_p": 0}, "top_p is 0; expected more than 0 and at most 1"),
        ({"top_p": 1.01}, "top_p is 1.01"),
        ({"top_k": -2}, "top_k is -2"),
        ({"top_k": 1.5}, "top_k is 1.5"),
        ({"min_p": 1.5}, "min_p is 1.5; expected 0 to 1"),
        ({"n": 0}, "n is 0; expected 1 to 128"),
        ({"n": 10**9}, "n is 1000000000"),
        ({"seed": 2**63}, "seed is 9223372036854775808"),
        ({"seed": 1.5}, "seed is 1.5"),
        ({"presence_penalty": 3}, "presence_penalty is 3; expected -2 to 2"),
        ({"frequency_penalty": float("-inf")}, "frequency_penalty is -inf"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0; expected more than 0"),
        ({"logit_bias": [1]}, "logit_bias is [1]; expected numbers from -100 to 100 by token id"),
        ({"logit_bias": {1: 101}}, "logit_bias has 101 for 1"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias has 1.0 for -1"),
        ({"logit_bias": {1: float("nan")}}, "logit_bias has nan for 1"),
        ({"min_tokens": -1}, "min_tokens is -1; expected 0 to max_tokens, which is 64"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens is 9"),
        ({"stop": 5}, "stop is 5; expected text, or a list of texts"),
        ({"stop": ["a", 1]}, "stop is ['a', 1]"),
        ({"stop": [""]}, "stop has a string of 0 characters"),
        ({"stop_token_ids": [-1]}, "stop_token_ids is [-1]; expected a list of token ids"),
        ({"stop_token_ids": "12"}, "stop_token_ids is '12'"),
        ({"include_stop_str_in_output": 1}, "include_stop_str_in_output is 1"),
        ({"logprobs": 21}, "logprobs is 21; expected 0 to 20, or None"),
        ({"logprobs": True}, "logprobs is True"),
        ({"prompt_logprobs": -1}, "prompt_logprobs is -1"),
    ],
)
def test_sampling_params(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=re.escape(text)):
        SamplingParams(**changes)


def test_sampling_params_that_are_greedy() -> None:
    assert type(SamplingParams(max_tokens=np.int64(3)).max_tokens) is int  # type: ignore[arg-type]
    assert SamplingParams(stop="a").stop == ["a"] and SamplingParams(stop=None).stop == []  # type: ignore[arg-type]
    assert SamplingParams(logit_bias={np.int32(3): 1}).logit_bias == {3: 1.0}  # type: ignore[dict-item]


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> Iterator[LLM]:
    with LLM(str(tiny_model), num_workers=1, max_model_len=16, keep_logits=True) as made:
        yield made


def test_calls(llm: LLM) -> None:
    """The same tokens and logits in all forms, and nothing starts for what cannot be served."""
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    (want,) = llm.generate(IDS, params)
    arrays: list[Any] = [np.array(IDS), torch.tensor(IDS), {"prompt_token_ids": IDS}]
    for prompts in (arrays, np.array([IDS, IDS]), (IDS, IDS)):
        outputs = llm.generate(prompts, sampling_params=params)
        assert [output.outputs[0].token_ids for output in outputs] == [want.outputs[0].token_ids] * len(prompts)
        assert all(output.prompt_token_ids == IDS for output in outputs)
    assert [token.token_id for token in llm.stream(arrays[1], sampling_params=[params])] == want.outputs[0].token_ids
    logits = [llm.compute_logits(prompt) for prompt in (IDS, arrays[1], arrays[2])]
    assert (
        all(np.array_equal(logits[0], each) for each in logits) and logits[0].argmax() == want.outputs[0].token_ids[0]
    )


def test_a_bias_of_no_token_is_refused(llm: LLM) -> None:
    for token in (203, 10**6):
        with pytest.raises(UsageError, match=f"^logit_bias of token id {token} is out of range; .* ids 0 to 202"):
            llm.generate([IDS], SamplingParams(max_tokens=1, logit_bias={5: 1.0, token: 1.0}))


def test_calls_that_are_refused(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: Any) -> None:
        raise AssertionError("a launch was started")

    monkeypatch.setattr(llm.engine, "launch", start)
    outside = "is out of range; the vocabulary has ids 0 to 202"
    for prompts, text in (
        ([1, 203], f"token id 203 {outside}"),
        ([1, -1], f"token id -1 {outside}"),
        (np.array([[2**40]]), f"token id {2**40} {outside}"),
        ([10**5000], f"token id 2**16609 or more {outside}"),
        ([IDS, []], "a prompt has no tokens"),
        ({"prompt_token_ids": []}, "a prompt has no tokens"),
        (torch.zeros((2, 0), dtype=torch.int64), "a prompt has no tokens"),
        ([1] * 16, "a prompt of 16 tokens leaves no room in a context of 16"),
        ("text", "tokenizer.json"),
        (b"text", "the prompt is a bytes"),
    ):
        for call in (llm.generate, lambda given: list(llm.stream(given))):
            with pytest.raises(UsageError, match=re.escape(text)):
                call(prompts)
    for one, text in (
        (b"text", "the prompt is a bytes"),
        ([IDS, IDS], "2 prompts were given; this call takes one"),
        (5, "the prompt is 5; expected text"),
    ):
        with pytest.raises(UsageError, match=text):
            llm.compute_logits(one)  # type: ignore[arg-type]
