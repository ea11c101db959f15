"""Seeds of requests that have none of their own."""

from __future__ import annotations

import hashlib
import itertools
import os


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
