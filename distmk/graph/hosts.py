"""Hosts: groups of consecutive ranks that share memory; ranks of different hosts reach each other over a network."""

from __future__ import annotations

from distmk.errors import UsageError


def host_ranks(host_sizes: tuple[int, ...], num_ranks: int) -> tuple[range, ...]:
    """The ranks of each host, in order; without sizes, one host has all. UsageError: the sizes do not add up to `num_ranks`."""
    sizes = host_sizes or (num_ranks,)
    if min(sizes) < 1 or sum(sizes) != num_ranks:
        raise UsageError(
            f"host_sizes is {','.join(map(str, sizes))}, but there are {num_ranks} ranks; give the number of ranks of each "
            "host, in rank order"
        )
    ends = [sum(sizes[: host + 1]) for host in range(len(sizes))]
    return tuple(range(end - size, end) for end, size in zip(ends, sizes, strict=True))
