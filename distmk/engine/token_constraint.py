"""What a constrained request may generate, as the engine asks it: one token after another, while the launch computes."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt


class TokenConstraint(Protocol):
    """Tells which tokens may come next in one completion, such as the state of a grammar.

    The engine asks for a mask at the beginning and after every token. It asks again, in the same state, when a request that was
    put back is sent once more. An exception of a method ends the request with finish reason error. Calls do not overlap; they
    hold up all tokens of the engine, so they should take well under the time of an iteration.
    """

    def fill_mask(self, words: npt.NDArray[np.uint32]) -> None:
        """Write the whole mask [mask_words(vocabulary)]: bit t % 32 of word t / 32 is set if token t may come next.

        Bits beyond the vocabulary are 0. `words` has the mask of an earlier token, or anything.
        """
        ...

    def accept(self, token: int) -> None:
        """A token was generated. Not called for one that ends the request: an end or stop token, or the last of max_tokens."""
        ...

    def copy(self) -> TokenConstraint:
        """Another constraint in the same state, for another completion of the same prompt."""
        ...
