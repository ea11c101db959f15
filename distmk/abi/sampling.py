"""Sampling of rows that need more than the best candidate: the parameters of a slot, and the record of logprobs."""

from __future__ import annotations

import ctypes
import enum
from ctypes import c_float, c_int32, c_uint32, c_uint64

MAX_LOGPROBS = 20  # most tokens reported beside the chosen one
MAX_BIASES = 300  # most of a request
MAX_BANNED = 84  # most end and stop tokens of a request that has a minimum length
TOKENS_PER_SEGMENT = 1024  # a row of logits is divided into segments of so many tokens
COUNT_IN_PROMPT = 1 << 31  # bit of a token's count that says it is in the prompt; the other bits count it in the output
# Drawn rows that have no token instead of one (`Candidate.token`):
PENDING_TOKEN = -2  # the mask of the row's position has not come yet; the row is repeated in the next iteration
NO_TOKEN_ALLOWED = -3  # the mask allows no token, or biases, bans and the model exclude all that it allows


class RowSample(enum.IntEnum):
    """What happens to the logits of a row (`BatchRow.sample`)."""

    NONE = 0
    GREEDY = 1  # the best candidate
    DRAW = 2  # a token is drawn from the whole distribution, with the parameters of the row's slot
    SCORE = 3  # logprobs of the prompt's next token; nothing is drawn
    VERIFY = 4  # DRAW, in a row whose token is a draft; counts of tokens do not have this draft and those before it


class SamplingFlag(enum.IntEnum):
    """Bits of `SlotSampling.flags`."""

    PENALTIES = 1  # one of the three penalties is in use, so sampling reads the counts of tokens
    SEEDED = 2  # the request has a seed, so its rows keep to programs (csrc/runtime/batch_builder.h)


class SlotSampling(ctypes.Structure):
    """Sampling parameters of the sequence in a slot. At admission the scheduler step copies them from the request, and fills
    in `tokens`, `prompt_len` and `num_counted`.

    tokens, biases, mask: operands, or addresses that the kernel can read.
    tokens: i32, the ids of the sequence by position: the prompt, and the output that was generated before the sequence was
    last admitted; with drafts all output. Needed for penalties, and for the logprobs of a prompt.
    biases: Bias [num_biases], then [num_banned] tokens that are not drawn before `min_tokens` tokens; their values are
    unused.
    mask: TokenMask; 0: all tokens are allowed.
    num_counted: positions whose tokens are in the slot's counts; 0 at admission, then advanced by `count_tokens`.
    """

    _fields_ = [
        ("tokens", c_uint64),
        ("biases", c_uint64),
        ("mask", c_uint64),
        ("seed", c_uint64),
        ("temperature", c_float),  # below 1e-5: the best token
        ("top_p", c_float),  # 1: all tokens
        ("min_p", c_float),  # 0: all tokens
        ("repetition_penalty", c_float),  # 1: none
        ("presence_penalty", c_float),
        ("frequency_penalty", c_float),
        ("top_k", c_uint32),  # 0: all tokens
        ("prompt_len", c_uint32),
        ("min_tokens", c_uint32),
        ("num_biases", c_uint32),
        ("num_banned", c_uint32),
        ("num_logprobs", c_int32),  # best tokens reported with a drawn one; -1: no report
        ("num_prompt_logprobs", c_int32),  # best tokens reported with a token of the prompt; -1: no report
        ("flags", c_uint32),  # SamplingFlag
        ("num_counted", c_uint32),
        ("reserved", c_uint32),
    ]


class TokenMask(ctypes.Structure):
    """The tokens that a constrained sequence may get next. The host writes it while iterations run, in its own memory.

    Behind it are u32 words, whole vectors of 16 bytes: bit t % 32 of word t / 32 is set if token t is allowed.
    position: of the token that the words are for, which is the number of tokens before it; 0: there are no words yet. The
    host stores it after the words, and changes the words only once it has got that token.
    """

    _fields_ = [("position", c_uint64), ("reserved", c_uint64)]


class Bias(ctypes.Structure):
    """A number that is added to the logit of a token."""

    _fields_ = [("token", c_int32), ("value", c_float)]


class LogprobRecord(ctypes.Structure):
    """Log-probabilities by the model's own logits: of `token`, which was drawn or given, and of the `num` best tokens.

    rank: number of tokens that are at least as probable as `token`, itself included (vLLM's rank).
    """

    _fields_ = [
        ("token", c_int32),
        ("logprob", c_float),
        ("rank", c_uint32),
        ("num", c_uint32),
        ("tokens", c_int32 * MAX_LOGPROBS),
        ("logprobs", c_float * MAX_LOGPROBS),
    ]
