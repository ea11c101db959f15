"""Automatic prefix caching: which pages of the KV cache hold which tokens, as far as the host knows.

A full page is named by the hash of its tokens and of all tokens before them (as in vLLM). The host only offers pages: the batcher
takes one if its content has not been replaced since, and says how many tokens it found cached.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

Page = tuple[int, int]  # a page and the generation of its content (`abi.PageRef`)
_DIGEST_BYTES = 16  # long enough that nobody finds two prompts with the same digest


@dataclass
class CachedTokens:
    """How far the tokens of a sequence are hashed: digests of its first full pages, of which `num_added` are in the cache."""

    digests: list[bytes] = field(default_factory=list)
    num_added: int = 0


class PrefixCache:
    """Pages by the hash of their tokens. At most one entry for each page, as a page with new content replaces its entry."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self._pages: dict[bytes, Page] = {}
        self._digests: dict[int, bytes] = {}  # by page

    def __len__(self) -> int:
        return len(self._pages)

    def clear(self) -> None:
        """Forget all pages: their contents are lost."""
        self._pages.clear()
        self._digests.clear()

    def find(self, ids: Sequence[int], tokens: CachedTokens) -> list[Page]:
        """Pages with the first tokens of a prompt, but for its last token, which must be computed."""
        found: list[Page] = []
        for digest in self.digests(ids, tokens, (len(ids) - 1) // self.page_size):
            page = self._pages.get(digest)
            if page is None:
                break
            found.append(page)
        return found

    def add(self, ids: Sequence[int], pages: Sequence[Page], tokens: CachedTokens) -> None:
        """Keys and values of all of `ids` have been computed, in these pages."""
        digests = self.digests(ids, tokens, len(ids) // self.page_size)
        for index in range(tokens.num_added, len(digests)):
            digest, (page, generation) = digests[index], pages[index]
            before = self._digests.get(page)
            if before is not None and before in self._pages and self._pages[before][0] == page:
                del self._pages[before]
            self._pages[digest], self._digests[page] = (page, generation), digest
            tokens.num_added = index + 1

    def digests(self, ids: Sequence[int], tokens: CachedTokens, num_pages: int) -> list[bytes]:
        """The digests of the first pages of `ids`. Those that are not known yet are added to `tokens`."""
        known = tokens.digests
        if len(known) < num_pages:
            data, size = np.array(ids, np.int32).tobytes(), 4 * self.page_size
            for index in range(len(known), num_pages):
                text = (known[-1] if known else b"") + data[index * size : (index + 1) * size]
                known.append(hashlib.blake2b(text, digest_size=_DIGEST_BYTES).digest())
        return known[:num_pages]
