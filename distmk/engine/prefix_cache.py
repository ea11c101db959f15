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
class PageDigests:
    """Digests of the first full pages of one sequence, the first `num_added` of them in the cache."""

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

    def find(self, ids: Sequence[int], hashed: PageDigests) -> list[Page]:
        """Pages with the first tokens of a prompt, but for its last token, which must be computed."""
        found: list[Page] = []
        for digest in self.digests(ids, hashed, (len(ids) - 1) // self.page_size):
            page = self._pages.get(digest)
            if page is None:
                break
            found.append(page)
        return found

    def add(self, ids: Sequence[int], pages: Sequence[Page], hashed: PageDigests) -> None:
        """Keys and values of all of `ids` have been computed, in these pages."""
        digests = self.digests(ids, hashed, len(ids) // self.page_size)
        for index in range(hashed.num_added, len(digests)):
            digest, (page, generation) = digests[index], pages[index]
            before = self._digests.get(page)
            if before is not None and before in self._pages and self._pages[before][0] == page:
                del self._pages[before]
            self._pages[digest], self._digests[page] = (page, generation), digest
            hashed.num_added = index + 1

    def digests(self, ids: Sequence[int], hashed: PageDigests, num_pages: int) -> list[bytes]:
        """The digests of the first pages of `ids`. New ones are added to `hashed`."""
        known = hashed.digests
        if len(known) < num_pages:
            data, size = np.array(ids, np.int32).tobytes(), 4 * self.page_size
            for index in range(len(known), num_pages):
                text = (known[-1] if known else b"") + data[index * size : (index + 1) * size]
                known.append(hashlib.blake2b(text, digest_size=_DIGEST_BYTES).digest())
        return known[:num_pages]


class PendingPrefixes:
    """Pages that the requests of a launch will have filled once their prompts are read, by the hash of their tokens."""

    def __init__(self, cache: PrefixCache) -> None:
        self.cache = cache
        self._readers: dict[bytes, int] = {}  # number of the request that fills the page with this digest
        self._num_tokens: dict[int, int] = {}  # that each of these requests has to read

    def add(self, number: int, ids: Sequence[int], hashed: PageDigests) -> list[Page]:
        """Request `number` is about to read the prompt `ids`. Returns pages with its first tokens, which need not be read."""
        found = self.cache.find(ids, hashed)
        num_cached = len(found)
        self._num_tokens[number] = len(ids) - num_cached * self.cache.page_size
        for digest in self.cache.digests(ids, hashed, len(ids) // self.cache.page_size)[num_cached:]:
            self._readers.setdefault(digest, number)
        return found

    def remove(self, number: int, hashed: PageDigests) -> None:
        """Request `number` has read its prompt, or is over. Does nothing if it was removed before."""
        if self._num_tokens.pop(number, None) is not None:
            for digest in hashed.digests:
                if self._readers.get(digest) == number:
                    del self._readers[digest]

    def is_reading(self, number: int) -> bool:
        """Whether request `number` has been added and not removed."""
        return number in self._num_tokens

    def reader_of(self, ids: Sequence[int], hashed: PageDigests) -> int | None:
        """The request that a prompt had better wait for, if any.

        It fills pages that begin this prompt and are not cached. They are at least half of what this prompt has to read, so
        that waiting pays. They are also at least half of what the other one has to read, so that waiting takes no longer than
        reading it all twice.
        """
        page_size = self.cache.page_size
        num_cached = len(self.cache.find(ids, hashed))
        reader, num_shared = None, 0
        for digest in self.cache.digests(ids, hashed, (len(ids) - 1) // page_size)[num_cached:]:
            if digest not in self._readers:
                break
            reader, num_shared = self._readers[digest], num_shared + page_size
        if reader is None or 2 * num_shared < max(len(ids) - num_cached * page_size, self._num_tokens[reader]):
            return None
        return reader
