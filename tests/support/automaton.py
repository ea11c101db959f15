"""Random automata over token ids as constraints of requests, and as the oracle of what may come."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Automaton:
    """In a state some tokens are allowed, and each leads to a state. allowed: [states, vocabulary]; following: likewise."""

    allowed: Mask
    following: npt.NDArray[np.int64]

    @staticmethod
    def random(rng: np.random.Generator, vocab: int, num_states: int = 12) -> Automaton:
        """States allow from one token to most of them."""
        allowed = rng.random((num_states, vocab)) < rng.choice([0.0, 0.02, 0.2, 0.9], (num_states, 1))
        allowed[np.arange(num_states), rng.integers(0, vocab, num_states)] = True
        return Automaton(allowed, rng.integers(0, num_states, (num_states, vocab)))

    def masks(self, tokens: list[int]) -> Iterator[Mask]:
        """What is allowed at each of the tokens. AssertionError: one of them is not."""
        state = 0
        for place, token in enumerate(tokens):
            assert self.allowed[state, token], f"token {place}, {token}, is not allowed in state {state}: {tokens}"
            yield self.allowed[state]
            state = int(self.following[state, token])


@dataclass
class Walk:
    """A TokenConstraint: a walk through an automaton.

    late_s: how long each mask takes. fails_at: the number of a token that it refuses to accept.
    """

    automaton: Automaton
    late_s: Callable[[], float] = lambda: 0.0
    fails_at: int = -1
    state: int = 0
    accepted: list[int] = field(default_factory=list)
    num_masks: int = 0

    def fill_mask(self, words: npt.NDArray[np.uint32]) -> None:
        allowed = self.automaton.allowed[self.state]
        assert words.shape == (-(-len(allowed) // 32),) and words.dtype == np.uint32
        if delay_s := self.late_s():
            time.sleep(delay_s)
        bits = np.pad(allowed, (0, 32 * len(words) - len(allowed)))
        words[:] = np.packbits(bits, bitorder="little").view(np.uint32)
        self.num_masks += 1

    def accept(self, token: int) -> None:
        assert self.automaton.allowed[self.state, token], f"{token} in state {self.state} behind {self.accepted}"
        if len(self.accepted) == self.fails_at:
            raise ValueError("no such\nway")
        self.accepted.append(token)
        self.state = int(self.automaton.following[self.state, token])

    def copy(self) -> Walk:
        return Walk(self.automaton, self.late_s, self.fails_at, self.state, list(self.accepted))
