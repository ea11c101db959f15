"""Sampling parameters as the kernel takes them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from distmk.abi import MAX_BANNED, MAX_BIASES, Bias, RowSample, SamplingFlag, SlotSampling
from distmk.engine.sampling_params import SamplingParams
from distmk.errors import UsageError

MIN_TEMPERATURE = 1e-5  # below: the best token, as in vLLM
NO_PENALTIES = (1.0, 0.0, 0.0)


def penalties_of(params: SamplingParams) -> tuple[float, float, float]:
    """Repetition, presence and frequency penalty."""
    return params.repetition_penalty, params.presence_penalty, params.frequency_penalty


def row_sample_of(params: SamplingParams) -> RowSample:
    """How the rows of a request are sampled: GREEDY where the best token is enough and nothing is reported of it, else DRAW."""
    best = params.temperature < MIN_TEMPERATURE or params.top_k == 1
    changed = penalties_of(params) != NO_PENALTIES or params.logit_bias or params.min_tokens
    return RowSample.GREEDY if best and not changed and params.logprobs is None else RowSample.DRAW


def num_unscored(params: SamplingParams, prompt_len: int, num_scored: int) -> int:
    """Tokens of a prompt, its last ones, whose log probabilities are asked for and not known. The first token has none."""
    return 0 if params.prompt_logprobs is None else prompt_len - 1 - num_scored


def biases_of(params: SamplingParams, eos_ids: Iterable[int]) -> tuple[Mapping[int, float], list[int]]:
    """Biases by token, and the tokens that are banned before `min_tokens`: the model's end tokens `eos_ids` and stop tokens.
    UsageError: there are more than a slot holds.
    """
    biases = params.logit_bias or {}
    banned = list(dict.fromkeys([*eos_ids, *params.stop_token_ids])) if params.min_tokens else []
    for name, num, most in (("logit_bias", len(biases), MAX_BIASES), ("stop_token_ids", len(banned), MAX_BANNED)):
        if num > most:
            raise UsageError(f"{name} has {num} tokens, those of the model included; at most {most} can be given")
    return biases, banned


def pack_sampling(
    params: SamplingParams, eos_ids: Iterable[int], engine_seed: int | None = None
) -> tuple[SlotSampling, list[Bias]]:
    """The parameters, and what `SlotSampling.biases` is to point to: see `biases_of`. What follows from the request at its
    admission (tokens, prompt_len, num_counted) is the batcher's to fill.

    `engine_seed`: where the parameters have no seed; None: a random one. A request is SEEDED by a seed of its own alone.
    """
    seed = engine_seed if params.seed is None else params.seed
    biases, banned = biases_of(params, eos_ids)
    repetition, presence, frequency = penalties_of(params)
    penalizes = penalties_of(params) != NO_PENALTIES
    slot = SlotSampling(
        seed=int.from_bytes(os.urandom(8), "little") if seed is None else seed % (1 << 64),
        temperature=params.temperature,
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        top_k=max(params.top_k, 0),
        min_tokens=params.min_tokens,
        num_biases=len(biases),
        num_banned=len(banned),
        num_logprobs=-1 if params.logprobs is None else params.logprobs,
        num_prompt_logprobs=-1 if params.prompt_logprobs is None else params.prompt_logprobs,
        flags=SamplingFlag.PENALTIES * penalizes | SamplingFlag.SEEDED * (params.seed is not None),
    )
    return slot, [Bias(token, value) for token, value in [*biases.items(), *((token, 0.0) for token in banned)]]
