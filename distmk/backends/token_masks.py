"""Masks of allowed tokens in host memory, which a launch reads while it runs."""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt

from distmk.abi import TokenMask
from distmk.backends.memory_order import fence
from distmk.tasks.sampling import mask_vector_words, mask_words

_HEADER_WORDS = ctypes.sizeof(TokenMask) // 4


class TokenMasks:
    """A `TokenMask` for each entry of the request table, with words for a vocabulary of `vocab_size` tokens.

    memory: u32 [requests, header and words]. address: at which the kernel finds it.
    """

    def __init__(self, num_requests: int, vocab_size: int) -> None:
        self._num_words = mask_words(vocab_size)
        self.memory = np.zeros((num_requests, _HEADER_WORDS + mask_vector_words(vocab_size)), np.uint32)
        self.address = 0

    def clear(self, entry: int) -> int:
        """Say that the mask of an entry has no words yet, before the launch learns of its request. Returns its address."""
        self.memory[entry, :_HEADER_WORDS] = 0
        return self.address + entry * self.memory.strides[0]

    def words(self, entry: int) -> npt.NDArray[np.uint32]:
        """The words of an entry [mask_words]. They may be written until `publish`, and again once the token has come."""
        return self.memory[entry, _HEADER_WORDS : _HEADER_WORDS + self._num_words]

    def publish(self, entry: int, position: int) -> None:
        """Let the launch use the words for the token at `position`, the number of tokens before it."""
        stamp = self.memory[entry, :2].view(np.uint64)
        with fence:
            stamp[0] = position
