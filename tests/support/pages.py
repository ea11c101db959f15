"""The pages of the KV cache between two launches, as the batcher left them."""

from __future__ import annotations

import ctypes

import numpy as np

from distmk import LLM
from distmk.abi import BatcherState, KvPage, PagePoolState


def pool_of(llm: LLM) -> tuple[BatcherState, PagePoolState, list[KvPage]]:
    """The batcher's state, that of the pool, and all pages, once the launch is over."""
    raw = llm.between_launches(lambda: llm.session.view("batcher").tobytes())
    begin = ctypes.sizeof(BatcherState)
    end = begin + ctypes.sizeof(PagePoolState)
    pages = (KvPage * llm.stats().num_kv_pages).from_buffer_copy(raw[end:])
    return BatcherState.from_buffer_copy(raw), PagePoolState.from_buffer_copy(raw[begin:]), list(pages)


def check_all_free(llm: LLM) -> None:
    """Fail unless no page is in use, and each that was is in the list of free pages once, linked in both directions."""
    state, pool, pages = pool_of(llm)
    assert state.num_running == 0 and state.num_free_pages == len(pages), (state.num_running, state.num_free_pages)
    touched = pages[: pool.num_touched]
    assert not [page.num_users for page in touched if page.num_users]
    order, page = [], pool.first_free
    while page >= 0 and len(order) <= len(touched):
        order.append(page)
        page = touched[page].next
    assert sorted(order) == list(range(len(touched))), order
    before = [-1, *order[:-1]] if order else []
    assert [touched[page].previous for page in order] == before and pool.last_free == (order[-1] if order else -1)
    stats = llm.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_free_kv_pages) == (0, 0, len(pages))


def random_ids(rng: np.random.Generator, length: int) -> list[int]:
    """A prompt for the tiny model."""
    return [int(token) for token in rng.integers(0, 203, length)]
