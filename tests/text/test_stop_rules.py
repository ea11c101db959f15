"""Where completions end and what their text shows of the end: vLLM's rules for stop strings, stop tokens and special tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.byte_fallback import byte_fallback
from test_tokenizer_text import WORDS

from distmk.abi import FinishReason
from distmk.api.input_processor import InputProcessor
from distmk.api.outputs import output_of
from distmk.backends.launch_block import Token
from distmk.engine.request import Request
from distmk.engine.sampling_params import SamplingParams
from distmk.errors import UsageError
from distmk.text.tokenizer import Tokenizer

THE, CAT, S, END = 257, 258, 259, 256 + len(WORDS)
VOCAB_SIZE = END + 1


def complete(tokens: list[tuple[int, FinishReason]], **params: Any) -> Request:
    """A completion of "the" by `tokens`, up to the first that ends it."""
    request = InputProcessor(VOCAB_SIZE, 100, Tokenizer(byte_fallback(WORDS))).make_requests(
        "the", SamplingParams(**params)
    )[0]
    for token, finish in tokens:
        if request.append(Token(0, token, finish, 0)).finish_reason is not None:
            break
    return request


def told(request: Request) -> tuple[str, str | None, int | str | None]:
    output = output_of(request).outputs[0]
    return output.text, output.finish_reason, output.stop_reason


NONE, STOP, LENGTH = FinishReason.NONE, FinishReason.STOP, FinishReason.LENGTH


@pytest.mark.parametrize(
    ("tokens", "params", "want"),
    [
        ([(CAT, NONE), (S, LENGTH)], {}, (" cats", "length", None)),
        ([(CAT, NONE), (END, STOP)], {}, (" cat", "stop", None)),
        ([(CAT, NONE), (END, STOP)], {"include_stop_str_in_output": True}, (" cat", "stop", None)),
        ([(CAT, NONE), (END, STOP)], {"skip_special_tokens": False}, (" cat", "stop", None)),
        (
            [(CAT, NONE), (END, STOP)],
            {"skip_special_tokens": False, "include_stop_str_in_output": True},
            (" cat<s>", "stop", None),
        ),
        ([(CAT, NONE), (END, NONE), (CAT, LENGTH)], {"skip_special_tokens": False}, (" cat<s> cat", "length", None)),
        ([(CAT, NONE), (S, NONE), (S, LENGTH)], {"stop_token_ids": [S]}, (" cat", "stop", S)),
        (
            [(CAT, NONE), (S, NONE), (S, LENGTH)],
            {"stop_token_ids": [S], "include_stop_str_in_output": True},
            (" cats", "stop", S),
        ),
        ([(CAT, NONE), (S, NONE)], {"stop": ["ats"]}, (" c", "stop", "ats")),
        ([(CAT, NONE), (S, NONE)], {"stop": "ats", "include_stop_str_in_output": True}, (" cats", "stop", "ats")),
        ([(CAT, NONE), (END, NONE), (S, LENGTH)], {"stop": ["zz", "<s>"]}, (" cat", "stop", "<s>")),
        ([(CAT, NONE), (END, STOP)], {"stop": ["<s>"]}, (" cat", "stop", "<s>")),
        (
            [(CAT, NONE), (END, NONE)],
            {"stop": ["<s>"], "include_stop_str_in_output": True},
            (" cat<s>", "stop", "<s>"),
        ),
        ([(CAT, NONE), (END, NONE)], {"stop": ["<s>"], "skip_special_tokens": False}, (" cat", "stop", "<s>")),
        (
            [(CAT, NONE), (END, NONE)],
            {"stop": ["<s>"], "skip_special_tokens": False, "include_stop_str_in_output": True},
            (" cat<s>", "stop", "<s>"),
        ),
        (
            [(CAT, NONE), (END, NONE), (CAT, NONE), (END, NONE)],
            {"stop": ["<s>"], "min_tokens": 3},
            (" cat cat", "stop", "<s>"),
        ),
        ([(CAT, NONE), (S, LENGTH)], {"stop": ["\ud800"]}, (" cats", "length", None)),  # not Unicode: never met
        ([(0xE6, NONE), (END, NONE)], {"stop": ["<s>", "\ufffdx"]}, ("\ufffd", "stop", "<s>")),
    ],
)
def test_ends(
    tokens: list[tuple[int, FinishReason]], params: Any, want: tuple[str, str | None, int | str | None]
) -> None:
    assert told(complete(tokens, **params)) == want


def test_no_max_tokens_is_all_that_fit() -> None:
    request = complete([(CAT, NONE)] * 90, max_tokens=None, min_tokens=7)
    assert request.max_tokens > 90 and told(request)[1] is None


@pytest.mark.parametrize("token", [VOCAB_SIZE, 10**8])
def test_stop_tokens_are_of_the_vocabulary(token: int) -> None:
    with pytest.raises(
        UsageError, match=f"^stop_token_ids with token id {token} is out of range; .* 0 to {VOCAB_SIZE - 1}"
    ):
        complete([], stop_token_ids=[S, token])


def test_numpy_values() -> None:
    """Arrays and scalars stand for lists and numbers wherever parameters take these."""
    params = SamplingParams(
        max_tokens=np.int64(5),
        temperature=np.array(0.5),
        ignore_eos=np.bool_(True),
        stop=np.array(["a", "b"]),
        stop_token_ids=np.arange(3),
    )  # type: ignore[arg-type]
    assert params == SamplingParams(
        max_tokens=5, temperature=0.5, ignore_eos=True, stop=["a", "b"], stop_token_ids=[0, 1, 2]
    )
    assert [type(each) for each in params.stop_token_ids] == [int] * 3
    for wrong in (np.array([0.5]), np.array([[1]]), np.array([-1]), [np.float32(1)]):
        with pytest.raises(UsageError, match="stop_token_ids is "):
            SamplingParams(stop_token_ids=wrong)  # type: ignore[arg-type]
