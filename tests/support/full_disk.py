"""A disk without room, without making one."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def disk_for(num_bytes: int) -> Iterator[None]:
    """Files of this process cannot grow beyond `num_bytes`: writing more fails with EFBIG, as with ENOSPC on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
