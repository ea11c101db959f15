"""The `n` completions of a prompt: each is a request of its own, with a seed of its own."""

from __future__ import annotations

from dataclasses import replace

from distmk.engine.sampling_params import SamplingParams


def one_by_one(params: SamplingParams) -> list[SamplingParams]:
    """The parameters of each of the `n` completions. With a seed, each has the seed plus its number, as in vLLM."""
    if params.n == 1:
        return [params]
    seeds = [None if params.seed is None else _wrapped(params.seed + number) for number in range(params.n)]
    return [replace(params, n=1, seed=seed) for seed in seeds]


def _wrapped(seed: int) -> int:
    """A seed that one behind the last of 64 bits continues as the first."""
    return (seed + (1 << 63)) % (1 << 64) - (1 << 63)
