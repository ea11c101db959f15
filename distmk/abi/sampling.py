"""Sampling of rows that need more than the best candidate: the parameters of a slot, and what is reported of a token."""

from __future__ import annotations

import ctypes
import enum
from ctypes import c_float, c_int32, c_uint32, c_uint64

MAX_LOGPROBS = 20  # tokens that are reported beside the chosen one
MAX_BIASES = 300  # of a request
MAX_BANNED = 84  # end and stop tokens of a request that has a minimum length
TOKENS_PER_SEGMENT = 1024  # of a row of logits, which is divided into segments
COUNT_IN_PROMPT = 1 << 31  # bit of a token's count: it is in the prompt; the others count it in the output


class RowSample(enum.IntEnum):
    """What happens to the logits of a row (`BatchRow.sample`)."""

    NONE = 0
    GREEDY = 1  # the best candidate
    DRAW = 2  # a token is drawn from the whole distribution, with the parameters of the row's slot
    SCORE = 3  # logprobs of the prompt's next token; nothing is drawn


class SamplingFlag(enum.IntEnum):
    """Bits of `SlotSampling.flags`: the first two are parts of the sampling that read a table."""

    PENALTIES = 1  # one of the three penalties is in use
    MASK = 2  # only tokens whose bit is set in the slot's row of the mask are allowed
    SEEDED = 4  # the request has a seed, and so its rows keep to programs (csrc/runtime/batch_builder.h)


class SlotSampling(ctypes.Structure):
    """Sampling parameters of the sequence in a slot, written by the scheduler step at admission: those of its request, with
    tokens, prompt_len and num_counted filled in.

    tokens, biases: operands, or addresses that the kernel can read.
    tokens: i32, the ids of the sequence by position: the prompt, and those of the output that were generated before the sequence
    was last admitted. Needed with penalties, and for the logprobs of a prompt.
    biases: Bias [num_biases], then [num_banned] tokens that are not drawn before `min_tokens` tokens, whose values are unused.
    num_counted: positions whose tokens are in the slot's counts; 0 at admission, then advanced by `sample_row`.
    """

    _fields_ = [
        ("tokens", c_uint64),
        ("biases", c_uint64),
        ("seed", c_uint64),
        ("temperature", c_float),  # below 1e-5: the best token
        ("top_p", c_float),  # 1: all
        ("min_p", c_float),  # 0: all
        ("repetition_penalty", c_float),  # 1: none
        ("presence_penalty", c_float),
        ("frequency_penalty", c_float),
        ("top_k", c_uint32),  # 0: all
        ("prompt_len", c_uint32),
        ("min_tokens", c_uint32),
        ("num_biases", c_uint32),
        ("num_banned", c_uint32),
        ("num_logprobs", c_int32),  # best tokens reported with a drawn one; -1: no report
        ("num_prompt_logprobs", c_int32),  # the same for the tokens of the prompt
        ("flags", c_uint32),  # SamplingFlag
        ("num_counted", c_uint32),
        ("reserved", c_uint32),
    ]


class Bias(ctypes.Structure):
    """What is added to the logit of a token."""

    _fields_ = [("token", c_int32), ("value", c_float)]


class LogprobRecord(ctypes.Structure):
    """Log-probabilities by the model's own logits: of `token`, which was drawn or given, and of the `num` best tokens.

    rank: tokens that are at least as probable as `token`, itself included (vLLM's rank).
    """

    _fields_ = [
        ("token", c_int32),
        ("logprob", c_float),
        ("rank", c_uint32),
        ("num", c_uint32),
        ("tokens", c_int32 * MAX_LOGPROBS),
        ("logprobs", c_float * MAX_LOGPROBS),
    ]
