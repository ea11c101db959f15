"""What a completion's tokens are held to, position by position."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt


class TokenConstraint(Protocol):
    """The tokens that one completion may have. `fill_mask` and `accept` are called in turn, by one thread at a time."""

    def fill_mask(self, words: npt.NDArray[np.uint32]) -> None:
        """Set the bits of the tokens that are allowed at the next position, and no others.

        words: uint32 [mask_words(vocab)]; token t is bit t % 32 of word t // 32. Bits beyond the vocabulary become 0.
        """
        ...

    def accept(self, token: int) -> None:
        """`token` was generated: the next position is the one behind it."""
        ...
