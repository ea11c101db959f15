"""Drafts that are right and wrong as a test wants them: the drafter `given`, and what it drafts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from distmk.backends.launch_block import LaunchBlock

Future = Callable[[list[int]], Sequence[int]]
"""The tokens that are drafted behind a prompt, which may be wrong."""


@contextmanager
def drafting(future: Future) -> Iterator[None]:
    """Requests that are sent meanwhile get the drafts `future(prompt)`; tokens before a preemption are part of the prompt."""
    write_request = LaunchBlock.write_request

    def with_future(self: LaunchBlock, entry: int, number: int, prompt: Sequence[int], *args: Any, **more: Any) -> None:
        write_request(self, entry, number, prompt, *args, **more)
        ids = list(future(list(prompt)))[: self.prompts.shape[1] - len(prompt)]
        self.prompts[entry, len(prompt) : len(prompt) + len(ids)] = ids

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LaunchBlock, "write_request", with_future)
        yield


def perturbed(rng: np.random.Generator, tokens: Sequence[int], share: float, vocab: int = 203) -> list[int]:
    """Tokens of which a `share` is replaced by others."""
    return [int(rng.integers(vocab)) if rng.random() < share else token for token in tokens]


def futures(prompts: Sequence[list[int]], outputs: Sequence[list[int]]) -> Future:
    """What is drafted behind a prompt, and behind it and tokens before a preemption: the rest of its output."""

    def future(ids: list[int]) -> list[int]:
        for prompt, output in zip(prompts, outputs, strict=True):
            if ids[: len(prompt)] == prompt and len(ids) <= len(prompt) + len(output):
                return output[len(ids) - len(prompt) :]
        return []

    return future


def accepted_by_place(
    tokens: Sequence[int], future: Sequence[int], num_drafts: int, *, first: int = 1
) -> tuple[int, list[int]]:
    """How often drafts are verified, and how many at each place are accepted, for one sequence with rows to spare.

    tokens: what is generated. future: what is drafted at the same places. first: tokens of the row that ends the prompt.
    """
    num_verified, accepted, at = 0, [0] * num_drafts, first
    while at < len(tokens):
        num = min(num_drafts, len(tokens) - at - 1)  # the row before it gives the last token
        right = 0
        while right < num and future[at + right] == tokens[at + right]:
            accepted[right] += 1
            right += 1
        num_verified += num > 0
        at += right + 1
    return num_verified, accepted
