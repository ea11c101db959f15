"""How many pages of the KV cache a rank gets: as many as fit into the memory that weights and activations leave."""

from __future__ import annotations

import ctypes
import dataclasses
from dataclasses import dataclass

from distmk.abi import PageRef
from distmk.backends.host.room import available_memory
from distmk.bootstrap import Bootstrap, agree
from distmk.bootstrap.messages import gather_json
from distmk.errors import UsageError
from distmk.lower import DecodeOptions
from distmk.model.config import ModelConfig
from distmk.program.fixed_memory import FixedMemory, fixed_memory, page_bytes

UNCOUNTED_BYTES = 16 << 20  # events, and gaps between allocations
_ID_BYTES = 4
_KEPT_BITS = 4  # of a number of pages: a program is compiled anew for another number
_SHORT_TOKENS = 4096  # of a context for whose tables there is room wherever there is room for a model
_HOST_TOKENS = (
    4096  # for which a host twin has pages by default, for each sequence: other programs share the host's memory
)


@dataclass(frozen=True)
class KvMemory:
    """The memory asked for: a share of the memory of this rank's device (a host's memory on the host twin), or a number of
    pages.

    may_shorten: the context is a default, so it may become as short as the memory of one sequence makes it.
    """

    utilization: float
    num_pages: int | None
    may_shorten: bool = False


def with_kv_pages(
    config: ModelConfig, options: DecodeOptions, asked: KvMemory, backend: str, bootstrap: Bootstrap
) -> DecodeOptions:
    """`options` with the number of pages that every rank has room for, and the context that fits into them; collective.

    At most as many as `max_seqs` sequences of `max_model_len` take. UsageError: some rank has no room for one such sequence,
    and `asked` does not let the context be shorter.
    """
    if asked.num_pages is not None:
        return _with_given_pages(options, asked.num_pages, asked.may_shorten)
    room = agree(bootstrap, lambda: _budget(asked.utilization, backend, bootstrap))

    def fitting(options: DecodeOptions) -> int:
        return _fitting_pages(config, options, room, bootstrap)

    longest, fits = options, fitting(options)
    if asked.may_shorten and fits < options.max_pages:
        if not fits:  # the tables of the long context may take what is left
            options = _shortened(options, _SHORT_TOKENS // options.page_size)
            fits = fitting(options)
        options = _shortened(options, rounded_down(fits))
    if fits < options.max_pages:
        raise _no_room(config, longest, room, bootstrap)
    most = options.max_pages * options.max_seqs
    if asked.may_shorten and backend != "cuda":
        most = max(options.max_pages, min(most, _HOST_TOKENS // options.page_size * options.max_seqs))
    num_pages = most if fits >= most else max(options.max_pages, rounded_down(fits))
    return _with_pages(options, num_pages)


def _with_given_pages(options: DecodeOptions, num_pages: int, may_shorten: bool) -> DecodeOptions:
    """UsageError: they are too few for one sequence."""
    if num_pages < options.max_pages and not may_shorten:
        raise UsageError(
            f"num_gpu_blocks_override is {num_pages}; one sequence of {options.max_model_len} tokens takes "
            f"{options.max_pages} blocks of {options.page_size}; give more, or lower max_model_len"
        )
    return _with_pages(_shortened(options, num_pages), num_pages)


def _with_pages(options: DecodeOptions, num_pages: int) -> DecodeOptions:
    most = options.max_pages * options.max_seqs
    return dataclasses.replace(options, num_pages=0 if num_pages == most else num_pages)


def _shortened(options: DecodeOptions, num_pages: int) -> DecodeOptions:
    """`options` with the context of so many pages, if it is longer. At least one page is left."""
    longest = max(1, num_pages) * options.page_size
    return dataclasses.replace(options, max_model_len=min(options.max_model_len, longest))


def _fitting_pages(config: ModelConfig, options: DecodeOptions, budget: int, bootstrap: Bootstrap) -> int:
    """The pages that every rank has room for, beside the rest of a program with `options`; collective."""
    fixed = _fixed(config, options, bootstrap)
    left = budget - fixed.local[bootstrap.rank] - fixed.heap - _uncounted_bytes(options)
    pages = max(0, left // page_bytes(config, options))
    least: int = min(gather_json(bootstrap, pages, "number of KV pages", int))
    return least


def _fixed(config: ModelConfig, options: DecodeOptions, bootstrap: Bootstrap) -> FixedMemory:
    least = dataclasses.replace(options, num_pages=options.max_pages)
    return agree(bootstrap, lambda: fixed_memory(config, least))


def _uncounted_bytes(options: DecodeOptions) -> int:
    """Events, gaps between allocations, and a launch's table of requests: ids of prompts, and pages that are cached."""
    request = options.max_model_len * _ID_BYTES + options.max_pages * ctypes.sizeof(PageRef)
    return UNCOUNTED_BYTES + 2 * options.max_seqs * request


def rounded_down(number: int) -> int:
    """`number` with its highest bits only."""
    shift = max(0, number.bit_length() - _KEPT_BITS)
    return number >> shift << shift


def _budget(utilization: float, backend: str, bootstrap: Bootstrap) -> int:
    """Bytes that this rank may use."""
    if backend != "cuda":
        return int(available_memory() * utilization) // bootstrap.local_size
    from distmk.backends.cuda.gpus import memory_budget  # needs packages that only GPU machines have

    return memory_budget(bootstrap.local_rank, bootstrap.local_size, utilization)


def _no_room(config: ModelConfig, options: DecodeOptions, budget: int, bootstrap: Bootstrap) -> UsageError:
    fixed = _fixed(config, options, bootstrap)
    sequence = options.max_pages * page_bytes(config, options)
    return UsageError(
        f"the KV cache of one sequence of {options.max_model_len} tokens takes {_gb(sequence)}, weights and activations of a "
        f"rank {_gb(max(fixed.local) + fixed.heap + _uncounted_bytes(options))}, and a rank may use {_gb(budget)}; "
        f"lower max_model_len, raise gpu_memory_utilization, or use more ranks than {bootstrap.world_size}"
    )


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB"
