"""How many pages of the KV cache a rank gets: as many as fit into the memory that weights and activations leave."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from distmk.backends.host.room import available_memory
from distmk.bootstrap import Bootstrap, agree
from distmk.bootstrap.messages import gather_json
from distmk.errors import UsageError
from distmk.lower import DecodeOptions
from distmk.model.config import ModelConfig
from distmk.program.fixed_memory import FixedMemory, fixed_memory, page_bytes

UNCOUNTED_BYTES = 16 << 20  # events, and gaps between allocations
_KEPT_BITS = 4  # of a number of pages: a program is compiled anew for another number


@dataclass(frozen=True)
class KvMemory:
    """What is asked for: a share of the memory of this rank's device (a host's memory on the host twin), or a number of pages."""

    utilization: float
    num_pages: int | None


def with_kv_pages(
    config: ModelConfig, options: DecodeOptions, asked: KvMemory, backend: str, bootstrap: Bootstrap
) -> DecodeOptions:
    """`options` with the number of pages that every rank has room for; collective.

    At most as many as `max_seqs` sequences of `max_model_len` take. UsageError: some rank has no room for one such sequence.
    """
    most, least = options.max_pages * options.max_seqs, options.max_pages
    if asked.num_pages is not None:
        if asked.num_pages < least:
            raise UsageError(
                f"num_gpu_blocks_override is {asked.num_pages}; one sequence of {options.max_model_len} tokens takes {least} "
                f"blocks of {options.page_size}; give more, or lower max_model_len"
            )
        return dataclasses.replace(options, num_pages=0 if asked.num_pages == most else asked.num_pages)
    fixed = agree(bootstrap, lambda: fixed_memory(config, dataclasses.replace(options, num_pages=least)))
    page = page_bytes(config, options)
    budget = agree(bootstrap, lambda: _budget(asked.utilization, backend, bootstrap))
    left = budget - fixed.local[bootstrap.rank] - fixed.heap - UNCOUNTED_BYTES
    fits: int = min(gather_json(bootstrap, max(0, left // page), "number of KV pages", int))
    if fits < least:
        raise _no_room(config, options, fixed, budget, bootstrap)
    if fits >= most:
        return options
    return dataclasses.replace(options, num_pages=max(least, rounded_down(fits)))


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


def _no_room(
    config: ModelConfig, options: DecodeOptions, fixed: FixedMemory, budget: int, bootstrap: Bootstrap
) -> UsageError:
    sequence = options.max_pages * page_bytes(config, options)
    return UsageError(
        f"the KV cache of one sequence of {options.max_model_len} tokens takes {_gb(sequence)}, weights and activations of a "
        f"rank {_gb(max(fixed.local) + fixed.heap + UNCOUNTED_BYTES)}, and a rank may use {_gb(budget)}; lower max_model_len, "
        f"raise gpu_memory_utilization, or use more ranks than {bootstrap.world_size}"
    )


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB"
