"""Seeds of requests: those of the completions of one prompt, and those of requests that have none of their own."""

from __future__ import annotations

import hashlib
import itertools
import os
from dataclasses import replace

from distmk.engine.sampling_params import SamplingParams


class RequestSeeds:
    """Draws a seed for each such request, in the order in which requests are made; threads may share it.

    `seed`: the engine's; the same one draws the same seeds, so a run that makes the same requests in the same order repeats
    itself. None: seeds differ from run to run.
    """

    def __init__(self, seed: int | None) -> None:
        self._key = os.urandom(8) if seed is None else str(seed).encode()
        self._numbers = itertools.count()

    def draw(self) -> int:
        """The next seed: a whole number of 64 bits with a sign."""
        digest = hashlib.blake2b(str(next(self._numbers)).encode(), key=self._key, digest_size=8).digest()
        return int.from_bytes(digest, "little", signed=True)


def each_completion(params: SamplingParams) -> list[SamplingParams]:
    """The parameters of each of the `n` completions. With a seed, each has the seed plus its number, as in vLLM."""
    if params.n == 1:
        return [params]
    seeds = [None if params.seed is None else _wrapped(params.seed + number) for number in range(params.n)]
    return [replace(params, n=1, seed=seed) for seed in seeds]


def _wrapped(seed: int) -> int:
    """A seed of 64 bits with a sign: the number after the largest is the smallest."""
    return (seed + (1 << 63)) % (1 << 64) - (1 << 63)
