"""The prompts that a launch is reading: a request that shares most of one had better wait, and find its pages cached."""

from __future__ import annotations

from collections.abc import Sequence

from distmk.engine.prefix_cache import CachedTokens, Page, PrefixCache


class PendingPrefixes:
    """Pages that the requests of a launch will have filled once their prompts are read, by the hash of their tokens."""

    def __init__(self, cache: PrefixCache) -> None:
        self.cache = cache
        self._readers: dict[bytes, int] = {}  # number of the request that fills the page with this digest
        self._num_tokens: dict[int, int] = {}  # that each of these requests has to read

    def add(self, number: int, ids: Sequence[int], tokens: CachedTokens) -> list[Page]:
        """Request `number` is about to read the prompt `ids`. Returns pages with its first tokens, which need not be read."""
        found = self.cache.find(ids, tokens)
        num_cached = len(found)
        self._num_tokens[number] = len(ids) - num_cached * self.cache.page_size
        for digest in self.cache.digests(ids, tokens, len(ids) // self.cache.page_size)[num_cached:]:
            self._readers.setdefault(digest, number)
        return found

    def remove(self, number: int, tokens: CachedTokens) -> None:
        """Request `number` has read its prompt, or is over. Does nothing if it was removed before."""
        if self._num_tokens.pop(number, None) is not None:
            for digest in tokens.digests:
                if self._readers.get(digest) == number:
                    del self._readers[digest]

    def is_reading(self, number: int) -> bool:
        """Whether request `number` has been added and not removed."""
        return number in self._num_tokens

    def reader_of(self, ids: Sequence[int], tokens: CachedTokens) -> int | None:
        """The request that a prompt had better wait for, if any.

        It fills pages that begin this prompt and are not cached: at least half of what this prompt has to read, so that waiting
        pays, and at least half of what the other one has to read, so that waiting takes no longer than reading it all twice.
        """
        page_size = self.cache.page_size
        num_cached = len(self.cache.find(ids, tokens))
        reader, num_shared = None, 0
        for digest in self.cache.digests(ids, tokens, (len(ids) - 1) // page_size)[num_cached:]:
            if digest not in self._readers:
                break
            reader, num_shared = self._readers[digest], num_shared + page_size
        if reader is None or 2 * num_shared < max(len(ids) - num_cached * page_size, self._num_tokens[reader]):
            return None
        return reader
